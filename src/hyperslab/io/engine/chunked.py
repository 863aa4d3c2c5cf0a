"""Arrays that lie in a file, or in many, as a grid of chunks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.box_copy import (
    DIRECT_NBYTES,
    MAX_THREADS,
    SCRATCH_NBYTES,
    BoxCopy,
    copy,
    strides_of,
    walk,
)
from hyperslab.io.engine.buffers import Bytes, scratch
from hyperslab.io.engine.contiguous import read_box
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.read_ahead import Range
from hyperslab.io.engine.threads import for_each
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.layout import Box, Span
from hyperslab.trace import active


class BlockReader(ABC):
    """A chunk of ``nbytes`` in blocks of ``block_nbytes``, the last of which may be shorter."""

    nbytes: int
    block_nbytes: int

    @abstractmethod
    def decode(self, ranges: Sequence[Range], out: Bytes) -> None:
        """Fills ``out`` with ``ranges`` of the chunk, which ascend and consist of whole blocks.

        Called while ``scratch`` is borrowed.
        """

    def read(self, box: BoxCopy) -> None:
        """Copies a box out of the chunk; its offset counts from the chunk's first byte."""
        if box.out.nbytes == self.nbytes and box.loops.is_run:
            self.decode([(0, self.nbytes)], box.target.reshape(-1).view(np.uint8))
            return
        ranges, (start, strides) = self._blocks_of(box)
        nbytes = sum(size for _, size in ranges)
        if nbytes == box.out.nbytes and box.loops.is_run:
            self.decode(ranges, box.target.reshape(-1).view(np.uint8))
            return
        with scratch.borrowed():
            decoded = scratch.take(nbytes)
            self.decode(ranges, decoded)
            sizes, _ = box.loops.target
            copy(np.ndarray(sizes, box.loops.dtype, decoded.data, start, strides), box.target)

    def _blocks_of(self, box: BoxCopy) -> tuple[list[Range], tuple[int, tuple[int, ...]]]:
        """The blocks that hold a box, and where in them it begins, with its strides there.

        Blocks between two indices of a dim are left out where those lie alike in their blocks: then
        what is decoded is strided too. Otherwise all blocks from the first to the last are taken.
        """
        loops, block = box.loops, self.block_nbytes
        num_outer = 0
        for dim, gap in zip(loops.dims, loops.gaps, strict=True):
            if gap < block or dim.in_file % block:
                break
            num_outer += 1
        outer, inner = loops.dims[:num_outer], loops.dims[num_outer:]
        start = box.offset % block
        pitch = -(-(start + loops.covers[num_outer]) // block) * block
        ranges = [
            (first, min(pitch, self.nbytes - first)) for _, first in walk(outer, box.offset - start)
        ]
        *steps, _ = strides_of([*(dim.size for dim in outer), pitch], np.dtype(np.uint8))
        return ranges, (start, (*steps, *(dim.in_file for dim in inner)))


Buffer = bytes | bytearray | memoryview | NDArray[Any]


class Chunk(NamedTuple):
    """Where the bytes of one chunk lie."""

    file: DataFile
    offset: int
    nbytes: int
    """As stored, compressed."""
    mask: int = 0
    """For ``decode``: the filters that were skipped when this chunk was written."""


Decode = Callable[[memoryview, Chunk], Buffer | BlockReader]


class _Cut(NamedTuple):
    """What a box has of one chunk, along one dim."""

    place: int
    """Of the chunk, in the grid."""
    start: int
    """In the chunk."""
    in_box: slice


def _cuts(span: Span, size: int) -> list[_Cut]:
    """The cuts of ``span`` by chunks of ``size``."""
    found = []
    for place in range(span.start // size, (span.stop - 1) // size + 1):
        part = span & Span(place * size, (place + 1) * size)
        found.append(_Cut(place, part.start - place * size, part.slice_from(span.start)))
    return found


class _Part(NamedTuple):
    """What a box has of one chunk."""

    position: tuple[int, ...]
    """Of the chunk, in the grid."""
    starts: tuple[int, ...]
    """In the chunk."""
    out: NDArray[Any]

    @classmethod
    def of(cls, cuts: tuple[_Cut, ...], out: NDArray[Any]) -> _Part:
        places, starts, in_box = zip(*cuts, strict=True) if cuts else ((), (), ())
        return cls(places, starts, out[(..., *in_box)])  # an array without dims, too


class ChunkedArray(ArrayReader):
    """An array cut into chunks of one shape, each stored whole, at the upper edges too.

    Args:
        shape: Of the array.
        dtype: As stored, of either byte order.
        chunk_shape: One extent a dim, at least 1.
        find: Gives the chunk at a position in the grid, or None for one that was never written.
            Called from many threads.
        decode: Turns the stored bytes of a chunk into those of its elements in C order; raises
            ``FormatError`` saying what is wrong with them, and need not name the file. What it
            gives may be the bytes given, or lie in ``scratch``: it is copied at once. Or it gives
            a ``BlockReader``, and only what a box needs is decoded. None says that chunks are
            stored as they are; then only what a box needs of a chunk is read.
        fill_value: What chunks hold that were never written.
        storage: What ``storage()`` gives.
        axes: The order of dims, where the format knows it.
        file: The one that has all chunks, where one has: it is opened once for all of a box.
    """

    def __init__(
        self,
        *,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        chunk_shape: Sequence[int],
        find: Callable[[tuple[int, ...]], Chunk | None],
        decode: Decode | None,
        fill_value: Any,
        storage: Storage,
        axes: str | None = None,
        file: DataFile | None = None,
    ) -> None:
        assert len(shape) == len(chunk_shape)
        assert all(extent > 0 for extent in chunk_shape)
        self.shape = tuple(shape)
        self.dtype = dtype.newbyteorder("=")
        self.axes = axes
        self._stored_dtype = dtype
        self._chunk_shape = tuple(chunk_shape)
        self._chunk_nbytes = math.prod(chunk_shape) * dtype.itemsize
        self._strides = strides_of(self._chunk_shape, dtype)
        self._find, self._decode, self._file = find, decode, file
        self._fill = np.asarray(fill_value, self.dtype)
        self._storage = storage

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not box:
            return
        grid = list(map(_cuts, box.spans, self._chunk_shape))
        first = _Part.of(tuple(cuts[0] for cuts in grid), out)
        with self._file.opened() if self._file else nullcontext() as fd:
            if math.prod(map(len, grid)) == 1:
                self._read_part(first, fd, MAX_THREADS)
                return
            read_row = partial(self._read_row, out, fd)
            rows = product(*grid[:-1], self._rows(grid[-1], out))
            if self._decode is None and self._copy_of(first).is_short:
                for row in rows:
                    read_row(row)
            else:
                for_each(read_row, rows)

    def _rows(self, cuts: list[_Cut], out: NDArray[Any]) -> list[list[_Cut]]:
        """Neighbours along the last dim that are best read at once, if they can be.

        That is where chunks have short rows and are stored as they are: joined, they are copied to
        longer stretches of ``out``, in two thirds of the time.
        """
        run = self._chunk_shape[-1] * self.dtype.itemsize if out.strides[-1] == out.itemsize else 0
        is_joined = self._decode is None and 0 < run < DIRECT_NBYTES
        num = max(1, SCRATCH_NBYTES // self._chunk_nbytes) if is_joined else 1
        return [cuts[n : n + num] for n in range(0, len(cuts), num)]

    def _read_row(self, out: NDArray[Any], fd: int | None, row: tuple[Any, ...]) -> None:
        """``row`` has a cut for each dim but the last, and a list of them for that."""
        *outer, last = row
        if fd is None or len(last) == 1 or not self._read_joined(outer, last, out, fd):
            for cut in last:
                self._read_part(_Part.of((*outer, cut), out), fd, 1)

    def _read_joined(self, outer: list[_Cut], last: list[_Cut], out: NDArray[Any], fd: int) -> bool:
        """Reads whole neighbours as one array with a dim more, if the file has them in a row."""
        num, size = len(last), self._chunk_shape[-1]
        around = last[0]._replace(in_box=slice(last[0].in_box.start, last[-1].in_box.stop))
        part = _Part.of((*outer, around), out)
        *shape, length = part.out.shape
        chunk = self._first_in_a_row(part.position, num)
        if length != num * size or chunk is None:
            return False
        joined = part.out.reshape(*shape, num, size).transpose(len(shape), *range(len(shape)), -1)
        strides, starts = (chunk.nbytes, *self._strides), (0, *part.starts)
        try:
            chunk.file.check_range(chunk.offset, num * chunk.nbytes)
            copy = BoxCopy.of(chunk.offset, self._stored_dtype, strides, starts, joined)
            read_box(chunk.file, fd, copy, chunk.offset + num * chunk.nbytes, 1)
        except FormatError:  # then they are read one by one, and the bad one is named
            return False
        return True

    def _first_in_a_row(self, position: tuple[int, ...], num: int) -> Chunk | None:
        """The chunk at ``position``, if it and its next neighbours follow each other in the file.

        Those are ``num`` chunks along the last dim, all of the right size.
        """
        *outer, place = position
        chunks = [self._find((*outer, place + n)) for n in range(num)]
        places = [(chunk.offset, chunk.nbytes) for chunk in chunks if chunk is not None]
        start, nbytes = places[0][0] if places else 0, self._chunk_nbytes
        in_a_row = [(start + n * nbytes, nbytes) for n in range(num)]
        return chunks[0] if places == in_a_row else None

    def _read_part(self, part: _Part, fd: int | None, max_threads: int) -> None:
        chunk = self._find(part.position)
        if chunk is None:
            part.out[...] = self._fill
            return
        try:
            chunk.file.check_range(chunk.offset, chunk.nbytes)
            if fd is None:
                with chunk.file.opened() as fd:
                    self._read_chunk(chunk, part, fd, max_threads)
            else:
                self._read_chunk(chunk, part, fd, max_threads)
        except FormatError as error:
            raise FormatError(
                f"{chunk.file.path}, chunk {part.position} at byte {chunk.offset}: {error}"
            ) from error
        except MemoryError as error:
            raise FormatError(
                f"{chunk.file.path}: there is no memory for chunk {part.position} of "
                f"{self._chunk_nbytes} bytes"
            ) from error

    def _read_chunk(self, chunk: Chunk, part: _Part, fd: int, max_threads: int) -> None:
        if self._decode is None:
            self._check_nbytes(chunk.nbytes)
            stop = chunk.offset + chunk.nbytes
            read_box(chunk.file, fd, self._copy_of(part, chunk.offset), stop, max_threads)
        else:
            self._read_decoded(chunk, part, fd, self._decode)

    def _copy_of(self, part: _Part, first: int = 0) -> BoxCopy:
        """Of ``part`` of the chunk that begins at byte ``first``."""
        return BoxCopy.of(first, self._stored_dtype, self._strides, part.starts, part.out)

    def _read_decoded(self, chunk: Chunk, part: _Part, fd: int, decode: Decode) -> None:
        with scratch.borrowed():
            stored = scratch.take(chunk.nbytes, chunk.offset).data
            with active.reading(chunk.file.path, chunk.nbytes):
                chunk.file.fill(fd, stored, chunk.offset)
            with active.decoding(chunk.file.path, part.out.nbytes):
                self._decode_into(part, decode(stored, chunk))

    def _decode_into(self, part: _Part, decoded: Buffer | BlockReader) -> None:
        if isinstance(decoded, BlockReader):
            decoded.read(self._copy_of(part))
            return
        pairs = zip(part.starts, part.out.shape, strict=True)
        within = tuple(slice(start, start + size) for start, size in pairs)
        copy(self._array(decoded)[within], part.out)

    def _array(self, decoded: Buffer) -> NDArray[Any]:
        flat = np.frombuffer(decoded, np.uint8)
        self._check_nbytes(flat.nbytes)
        return flat.view(self._stored_dtype).reshape(self._chunk_shape)

    def _check_nbytes(self, nbytes: int) -> None:
        if nbytes != self._chunk_nbytes:
            raise FormatError(
                f"it holds {nbytes} bytes, and a chunk of {self._stored_dtype} "
                f"{self._chunk_shape} has {self._chunk_nbytes}"
            )
