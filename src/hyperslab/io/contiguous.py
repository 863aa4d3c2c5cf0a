"""Arrays that lie in one piece in a file."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice, product
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import FormatError
from hyperslab.io.buffers import empty_aligned
from hyperslab.io.files import DataFile
from hyperslab.io.read_ahead import Range, RangeReader
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.io.threads import for_each, num_threads
from hyperslab.layout import Box

DIRECT_NBYTES = 16 << 10
"""Runs at least this long are read straight into place: a call costs as much as 16 KiB copied."""
GAP_NBYTES = 16 << 10
"""Gaps up to this long are read too, rather than with another call."""
SCRATCH_NBYTES = 1 << 20
"""Read at a time where runs are shorter; stays in the cache of a core until it is copied out."""
MAX_SPARSE_LANES = 2
"""Threads that work on a box of short stretches far apart."""
PIECE_NBYTES = 8 << 20
"""Longer runs are read in pieces of this size, so that the disk can be told of the next."""
SLOW_COPY = range(1, 32)
"""How many bytes past the file's a buffer's address lies in its page, where the kernel's copy is
2 to 5 times slower."""


class ContiguousArray(ArrayReader):
    """An array of ``shape`` whose bytes begin at ``offset`` in ``file``.

    ``dtype`` is that of the file, of either byte order; ``fortran`` says that the first dim varies
    fastest.
    """

    def __init__(
        self,
        file: DataFile,
        offset: int,
        shape: Sequence[int],
        dtype: DTypeLike,
        *,
        fortran: bool = False,
        axes: str | None = None,
        storage_kind: str = "contiguous",
        note: str | None = None,
    ) -> None:
        self._file, self._offset, self._fortran = file, offset, fortran
        self._stored = np.dtype(dtype)
        self.shape = tuple(map(int, shape))
        self.dtype = self._stored.newbyteorder("=")
        self.axes = axes
        nbytes = math.prod(self.shape) * self._stored.itemsize
        self._storage = Storage(kind=storage_kind, nbytes=nbytes, note=note)
        self._check(offset, offset + nbytes)

    def _check(self, start: int, stop: int) -> None:
        what = f"array of {self.dtype} {self.shape}"
        if start < 0 or min(self.shape, default=0) < 0:
            raise FormatError(f"{self._file.path} is damaged: its {what} begins at byte {start}")
        if (missing := stop - self._file.size) > 0:
            raise FormatError(
                f"{self._file.path} is truncated: {missing} bytes are missing, as its {what} ends "
                f"at byte {stop} and the file has {self._file.size}"
            )

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not box:
            return
        copy = self._copy_of(box, out)
        with self._file.opened() as fd:
            if copy.is_direct:
                copy.read_direct(self._file, fd)
            else:
                copy.read_by_scratch(self._file, fd)

    def _copy_of(self, box: Box, out: NDArray[Any]) -> _Copy:
        order = -1 if self._fortran else 1
        shape, spans = self.shape[::order], box.spans[::order]
        itemsize = self._stored.itemsize
        strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
        starts = [span.start * stride for span, stride in zip(spans, strides, strict=True)]
        sizes = [span.size for span in spans]
        dims = merged(
            _Dim(*numbers) for numbers in zip(sizes, strides, out.strides[::order], strict=True)
        )
        dims = dims or [_Dim(1, itemsize, itemsize)]
        return _Copy(self._offset + sum(starts), self._stored, tuple(dims), out)


class _Dim(NamedTuple):
    """One of the nested loops of a copy."""

    size: int
    in_file: int
    """Bytes from one index to the next."""
    in_out: int


def merged(dims: Iterable[_Dim]) -> list[_Dim]:
    """``dims`` without those of size 1, and with one in place of two that can be walked as one."""
    found: list[_Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        last = found[-1] if found else None
        if last and (last.in_file, last.in_out) == (dim.size * dim.in_file, dim.size * dim.in_out):
            found[-1] = _Dim(last.size * dim.size, dim.in_file, dim.in_out)
        else:
            found.append(dim)
    return found


@dataclass(frozen=True)
class _Copy:
    """A box on its way from the file, at ``offset``, to ``out``: nested loops over ``dims``."""

    offset: int
    dtype: np.dtype[Any]
    """In the file."""
    dims: tuple[_Dim, ...]
    """The last varies fastest in the file."""
    out: NDArray[Any]

    @property
    def is_direct(self) -> bool:
        """Whether the runs of the file are runs of ``out`` too, and long enough for a call each."""
        run = self.dims[-1]
        if not self.dtype.isnative or run[1:] != (self.dtype.itemsize,) * 2:
            return False
        if run.size * run.in_file < DIRECT_NBYTES:
            return len(self.dims) == 1
        return (self.out.ctypes.data - self.offset) % mmap.PAGESIZE not in SLOW_COPY

    @cached_property
    def target(self) -> NDArray[Any]:
        """``out``, with ``dims`` for its dims."""
        sizes, strides = [dim.size for dim in self.dims], [dim.in_out for dim in self.dims]
        return as_strided(self.out, sizes, strides)

    def read_direct(self, file: DataFile, fd: int) -> None:
        reader = RangeReader(
            file, fd, lambda: ((offset, len(buffer)) for offset, buffer in self._pieces())
        )
        for offset, buffer in self._pieces():
            reader.fill(buffer, offset)

    def _pieces(self) -> Iterator[tuple[int, memoryview]]:
        rows = self.target.view(np.uint8)
        for index, offset in zip(*_walk(self.dims[:-1], self.offset), strict=True):
            row = rows[index].data
            for start in range(0, len(row), PIECE_NBYTES):
                yield offset + start, row[start : start + PIECE_NBYTES]

    def read_by_scratch(self, file: DataFile, fd: int) -> None:
        blocks = _Blocks.of(self.dims, self.dtype.itemsize)
        reader = RangeReader(file, fd, lambda: blocks.ranges(self.offset))
        strides = [blocks.pitch, *(dim.in_file for dim in blocks.inner)]

        def read_lane(lane: Iterable[_Block]) -> None:
            scratch = _scratch()
            memory = scratch.data
            for index, ranges in lane:
                shift = ranges[0][0] % mmap.PAGESIZE  # it lies in its page as it does in the file
                for start, (offset, nbytes) in zip(count(shift, blocks.pitch), ranges):
                    reader.fill(memory[start : start + nbytes], offset)
                target = self.target[index]
                np.copyto(target, np.ndarray(target.shape, self.dtype, scratch, shift, strides))

        # Short calls from many threads spend their time waiting for Python's lock.
        num_lanes = MAX_SPARSE_LANES if blocks.is_sparse else num_threads()
        num_lanes = min(num_lanes, blocks.total)
        for_each(
            read_lane,
            [islice(blocks.walk(self.offset), lane, None, num_lanes) for lane in range(num_lanes)],
        )


_Block = tuple[tuple[int | slice, ...], list[Range]]
"""A place in the target, and the ranges of the file that hold what belongs there."""


@dataclass(frozen=True)
class _Blocks:
    """How a copy is cut into blocks that fit the scratch: ``num`` indices of ``cut`` in each.

    In the scratch, these are ``pitch`` bytes apart. They are read with one call, gaps and all, or
    if ``is_sparse`` with a call each.
    """

    outer: tuple[_Dim, ...]
    cut: _Dim
    inner: tuple[_Dim, ...]
    num: int
    pitch: int
    is_sparse: bool
    cover: int
    """Bytes of the file from the first to the last of one index of ``cut``."""

    @classmethod
    def of(cls, dims: tuple[_Dim, ...], itemsize: int) -> _Blocks:
        covers = [
            sum((dim.size - 1) * dim.in_file for dim in dims[first:]) + itemsize
            for first in range(len(dims) + 1)
        ]
        joined = len(dims)  # dims from here on are read with one call
        while joined and covers[joined] <= SCRATCH_NBYTES:
            if dims[joined - 1].in_file - covers[joined] > GAP_NBYTES:
                break
            joined -= 1
        is_sparse = joined > 0 and covers[joined] <= SCRATCH_NBYTES
        place = joined - is_sparse
        cut, cover = dims[place], covers[place + 1]
        # A pitch that keeps every slot at the place in its page that it has in the file.
        pitch = cover + (cut.in_file - cover) % mmap.PAGESIZE if is_sparse else cut.in_file
        num = max(1, min(cut.size, (SCRATCH_NBYTES - cover) // pitch + 1))
        return cls(dims[:place], cut, dims[place + 1 :], num, pitch, is_sparse, cover)

    def walk(self, offset: int) -> Iterator[_Block]:
        step = self.cut.in_file
        for index, start in zip(*_walk(self.outer, offset), strict=True):
            for first in range(0, self.cut.size, self.num):
                last = min(first + self.num, self.cut.size)
                if self.is_sparse:
                    ranges = [(start + i * step, self.cover) for i in range(first, last)]
                else:
                    ranges = [(start + first * step, (last - first - 1) * step + self.cover)]
                yield (*index, slice(first, last)), ranges

    @property
    def total(self) -> int:
        return math.prod(dim.size for dim in self.outer) * -(-self.cut.size // self.num)

    def ranges(self, offset: int) -> Iterator[Range]:
        return (found for _, ranges in self.walk(offset) for found in ranges)


def _walk(dims: Sequence[_Dim], offset: int) -> tuple[Iterator[tuple[int, ...]], Iterator[int]]:
    """All indices of ``dims``, and where each lies in the file."""
    steps = product(*(range(0, dim.size * dim.in_file, dim.in_file) for dim in dims))
    return product(*(range(dim.size) for dim in dims)), (offset + sum(step) for step in steps)


_thread = threading.local()


def _scratch() -> NDArray[np.uint8]:
    """This thread's own, which it keeps: new memory is slow."""
    if not hasattr(_thread, "scratch"):
        _thread.scratch = empty_aligned((SCRATCH_NBYTES + 2 * mmap.PAGESIZE,), np.uint8)
    found: NDArray[np.uint8] = _thread.scratch
    return found
