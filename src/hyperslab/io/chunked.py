"""Arrays that lie in a file, or in many, as a grid of chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.contiguous import ContiguousArray
from hyperslab.io.files import DataFile
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.io.scratch import scratch
from hyperslab.io.threads import for_each
from hyperslab.layout import Box, Span

Buffer = bytes | bytearray | memoryview | NDArray[Any]

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


class _Cut(NamedTuple):
    """What a box has of one chunk, along one dim."""

    place: int
    """Of the chunk, in the grid."""
    in_chunk: slice
    in_box: slice


def _cuts(span: Span, size: int) -> list[_Cut]:
    """The cuts of ``span`` by chunks of ``size``."""
    found = []
    for place in range(span.start // size, (span.stop - 1) // size + 1):
        part = span & Span(place * size, (place + 1) * size)
        found.append(_Cut(place, part.slice_from(place * size), part.slice_from(span.start)))
    return found


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
            gives may be the bytes given, or lie in ``scratch``: it is copied at once. None says
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
        def read_part(cuts: tuple[_Cut, ...]) -> None:
            position = tuple(cut.place for cut in cuts)
            target: tuple[Any, ...] = (..., *(cut.in_box for cut in cuts))  # of 0-d arrays too
            self._read_part(position, tuple(cut.in_chunk for cut in cuts), out[target])

        if box:
            along_dims = map(_cuts, box.spans, self._chunk_shape)
            for_each(read_part, product(*along_dims))

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
        chunk.file.check_range(chunk.offset, chunk.nbytes)
        with scratch.borrowed():
            stored = scratch.take(chunk.nbytes, chunk.offset).data
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
