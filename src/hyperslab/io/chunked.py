"""Arrays that lie in a file, or in many, as a grid of chunks."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.buffers import empty_aligned
from hyperslab.io.contiguous import ContiguousArray
from hyperslab.io.files import DataFile
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.io.threads import for_each
from hyperslab.layout import Box, Span

Buffer = bytes | bytearray | memoryview | NDArray[Any]

KEPT_NBYTES = 64 * 2**20
"""Scratch memory that a thread keeps for its next chunk."""
SHORT_ROWS = range(16, 4096)
"""Bytes of a row that NumPy copies faster as one item than as many."""


@dataclass(frozen=True)
class Chunk:
    """Where the bytes of one chunk lie."""

    file: DataFile
    offset: int
    nbytes: int
    """As stored, compressed."""
    mask: int = 0
    """For ``decode``: the filters that were skipped when this chunk was written."""


class ChunkedArray(ArrayReader):
    """An array cut into chunks of one shape, each stored whole, at the upper edges too.

    Args:
        shape: Of the array.
        dtype: As stored, of either byte order.
        chunk_shape: One extent a dim, at least 1.
        find: Gives the chunk at a position in the grid, or None for one that was never written.
            Called from many threads.
        decode: Turns the stored bytes of a chunk into those of its elements in C order; raises
            ``FormatError`` saying what is wrong with them, and need not name the file. The bytes
            given are valid until it returns what it made of them, which may be the same. None says
            that chunks are stored as they are; then only what a box needs of a chunk is read.
        fill_value: What chunks hold that were never written.
        storage: What ``storage()`` gives.
        axes: The order of dims, where the format knows it.
    """

    def __init__(
        self,
        *,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        chunk_shape: Sequence[int],
        find: Callable[[tuple[int, ...]], Chunk | None],
        decode: Callable[[memoryview, Chunk], Buffer] | None,
        fill_value: Any,
        storage: Storage,
        axes: str | None = None,
    ) -> None:
        assert len(shape) == len(chunk_shape)
        assert all(extent > 0 for extent in chunk_shape)
        self.shape = tuple(shape)
        self.dtype = dtype.newbyteorder("=")
        self.axes = axes
        self._stored_dtype = dtype
        self._chunk_shape = tuple(chunk_shape)
        self._chunk_nbytes = math.prod(chunk_shape) * dtype.itemsize
        self._find, self._decode = find, decode
        self._fill = np.asarray(fill_value, self.dtype)
        self._storage = storage

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        def read_part(position: tuple[int, ...]) -> None:
            whole = self._box_at(position)
            part = whole & box
            place: tuple[Any, ...] = (..., *part.slices_in(box))  # a view of 0-d arrays too
            self._read_part(position, part.slices_in(whole), out[place])

        for_each(read_part, self._positions(box))

    def _positions(self, box: Box) -> Iterator[tuple[int, ...]]:
        """The places in the grid of the chunks that ``box`` touches, in the order of the array."""
        if not box:
            return iter(())
        pairs = zip(box.spans, self._chunk_shape, strict=True)
        return product(*(range(span.start // n, (span.stop - 1) // n + 1) for span, n in pairs))

    def _box_at(self, position: tuple[int, ...]) -> Box:
        pairs = zip(position, self._chunk_shape, strict=True)
        return Box(tuple(Span(place * n, (place + 1) * n) for place, n in pairs))

    def _read_part(
        self, position: tuple[int, ...], part: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        """Fills ``out`` with ``part`` of the chunk at ``position``."""
        chunk = self._find(position)
        if chunk is None:
            out[...] = self._fill
            return
        try:
            if self._decode is None and (out.flags.c_contiguous or out.shape != self._chunk_shape):
                self._read_in_place(chunk, part, out)
            else:
                self._read_whole(chunk, part, out)
        except FormatError as error:
            raise FormatError(
                f"{chunk.file.path}, chunk {position} at byte {chunk.offset}: {error}"
            ) from error
        except MemoryError as error:
            raise FormatError(
                f"{chunk.file.path}: there is no memory for chunk {position} of "
                f"{self._chunk_nbytes} bytes"
            ) from error

    def _read_in_place(self, chunk: Chunk, part: tuple[slice, ...], out: NDArray[Any]) -> None:
        self._check_nbytes(chunk.nbytes)
        array = ContiguousArray(chunk.file, chunk.offset, self._chunk_shape, self._stored_dtype)
        array.read(Box.of(*((along.start, along.stop) for along in part)), out)

    def _read_whole(self, chunk: Chunk, part: tuple[slice, ...], out: NDArray[Any]) -> None:
        with _scratch.lent(chunk) as stored:
            chunk.file.read_into(stored, chunk.offset)
            decoded = stored if self._decode is None else self._decode(stored, chunk)
            _copy(self._array(decoded)[part], out)

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


def _copy(values: NDArray[Any], out: NDArray[Any]) -> None:
    """As ``out[...] = values``, and faster where rows are short: each is moved as one item."""
    if values.ndim and out.dtype == values.dtype:
        row_nbytes = out.shape[-1] * out.itemsize
        if row_nbytes in SHORT_ROWS and out.strides[-1] == values.strides[-1] == out.itemsize:
            values, out = values.view(f"V{row_nbytes}"), out.view(f"V{row_nbytes}")
    out[...] = values


class _Scratch(threading.local):
    """Memory for the stored bytes of a chunk; each thread has its own, and keeps it."""

    def __init__(self) -> None:
        self._kept = empty_aligned((0,), np.uint8)

    @contextmanager
    def lent(self, chunk: Chunk) -> Iterator[memoryview]:
        """As many bytes as ``chunk`` has stored, which its file must have.

        They lie in a page as they do in the file: so the kernel copies fastest.
        """
        chunk.file.check_range(chunk.offset, chunk.nbytes)
        start = chunk.offset % mmap.PAGESIZE
        memory, self._kept = self._kept, self._kept[:0]  # so that a nested read gets its own
        if memory.size < start + chunk.nbytes:
            memory = empty_aligned((start + chunk.nbytes,), np.uint8)
        yield memory.data[start : start + chunk.nbytes]
        if self._kept.size < memory.size <= KEPT_NBYTES:
            self._kept = memory


_scratch = _Scratch()
