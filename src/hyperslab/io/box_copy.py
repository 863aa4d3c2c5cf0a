"""A box on its way from a file into a buffer."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from operator import mul
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hyperslab.io.buffers import empty_aligned
from hyperslab.io.read_ahead import Range
from hyperslab.io.threads import for_each, num_threads

T = TypeVar("T")

DIRECT_NBYTES = 16 << 10
"""Runs at least this long are read straight into place: a call costs as much as 16 KiB copied."""
GAP_NBYTES = 16 << 10
"""Gaps up to this long are read too, rather than with another call."""
SCRATCH_NBYTES = 2 << 20
"""Read at a time where runs are shorter; stays in the cache until it is copied out."""
PIECE_NBYTES = 4 << 20
"""Longer runs are read in pieces of this size, by several threads."""
SLOW_COPY = range(1, 32)
"""How many bytes further into its page than the file's a buffer begins where the kernel's copy is
2 to 5 times slower."""
SHORT_NBYTES = 256 << 10
"""Threads that make shorter reads spend their time waiting for Python's lock: one makes them."""
MAX_THREADS = 4
"""Threads that read one box; more were no faster."""
SHORT_ROWS = range(16, 4096)
"""Bytes of a row that NumPy copies faster as one item than as many."""


class Reader(Protocol):
    """What a copy reads with: a file, or a chunk that is decoded as it is read."""

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fills ``buffer`` with the bytes from ``offset`` on."""


class Dim(NamedTuple):
    """One of the nested loops of a copy."""

    size: int
    in_file: int
    """Bytes from one index to the next."""
    in_out: int


def strides_of(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Bytes from one index to the next, for each dim of an array in C order."""
    return tuple(math.prod(shape[dim + 1 :]) * dtype.itemsize for dim in range(len(shape)))


def merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """``dims`` without those of size 1, and with one in place of two that can be walked as one."""
    found: list[Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        last = found[-1] if found else None
        if last and (last.in_file, last.in_out) == (dim.size * dim.in_file, dim.size * dim.in_out):
            found[-1] = Dim(last.size * dim.size, dim.in_file, dim.in_out)
        else:
            found.append(dim)
    return tuple(found)


@dataclass(frozen=True)
class BoxCopy:
    """Nested loops over ``dims``, from ``offset`` in a file to the first item of ``out``."""

    offset: int
    dtype: np.dtype[Any]
    """In the file."""
    dims: tuple[Dim, ...]
    """The last varies fastest in the file."""
    out: NDArray[Any]

    @classmethod
    def of(
        cls,
        first: int,
        dtype: np.dtype[Any],
        strides: Sequence[int],
        starts: Iterable[int],
        out: NDArray[Any],
    ) -> BoxCopy:
        """Of a box of the shape of ``out`` that begins at the indices ``starts``.

        ``strides`` are those of the array in the file, whose first item lies at ``first``.
        """
        offset = first + sum(map(mul, starts, strides))
        return cls(offset, dtype, merged(map(Dim, out.shape, strides, out.strides)), out)

    def __post_init__(self) -> None:
        if not self.dims:  # a single item
            itemsize = self.dtype.itemsize
            object.__setattr__(self, "dims", (Dim(1, itemsize, itemsize),))

    @cached_property
    def covers(self) -> tuple[int, ...]:
        """Bytes of the file from the first to the last item of ``dims[n:]``, for every ``n``."""
        sizes = [(dim.size - 1) * dim.in_file for dim in self.dims]
        return tuple(sum(sizes[n:]) + self.dtype.itemsize for n in range(len(sizes) + 1))

    @cached_property
    def is_direct(self) -> bool:
        """Whether the runs of the file are runs of ``out`` too, and long enough for a call each."""
        run = self.dims[-1]
        if not self.dtype.isnative or run[1:] != (self.dtype.itemsize,) * 2:
            return False
        if run.size * run.in_file < DIRECT_NBYTES:
            return len(self.dims) == 1
        address = self.out.__array_interface__["data"][0]
        return (address - self.offset) % mmap.PAGESIZE not in SLOW_COPY

    @property
    def is_short(self) -> bool:
        """Whether its reads are too short to be shared out to threads."""
        if not self.is_direct:
            return self._blocks.is_sparse and self._blocks.cover < SHORT_NBYTES
        row_nbytes = self.dims[-1].size * self.dtype.itemsize
        return len(self.dims) > 1 and row_nbytes < SHORT_NBYTES

    def is_all_until(self, stop: int) -> bool:
        """Whether it reads everything from its first byte to byte ``stop``, small gaps aside."""
        gaps = [dim.in_file - cover for dim, cover in zip(self.dims, self.covers[1:], strict=True)]
        return max(*gaps, stop - self.offset - self.covers[0]) <= GAP_NBYTES

    def run(self, reader: Reader, max_threads: int = MAX_THREADS) -> None:
        """Reads with ``reader``, on ``max_threads`` threads at most."""
        most = 1 if self.is_short else max_threads
        if self.is_direct:
            self._run_direct(reader, min(most, self.out.nbytes // PIECE_NBYTES))
        else:
            self._run_by_scratch(reader, min(most, self._blocks.total))

    def ranges(self) -> Iterator[Range]:
        """What is read of the file, in order."""
        if self.is_direct:
            return ((offset, len(buffer)) for offset, buffer in self._pieces())
        return self._blocks.ranges(self.offset)

    @cached_property
    def _target(self) -> NDArray[Any]:
        """``out``, with ``dims`` for its dims."""
        sizes, strides = [dim.size for dim in self.dims], [dim.in_out for dim in self.dims]
        out = self.out.squeeze()  # often it is that: then a slow call is spared
        return out if list(out.shape) == sizes else as_strided(self.out, sizes, strides)

    def _run_direct(self, reader: Reader, num_lanes: int) -> None:
        def read_pieces(lane: Iterable[tuple[int, memoryview]]) -> None:
            for offset, buffer in lane:
                reader.fill(buffer, offset)

        for_each(read_pieces, _lanes(self._pieces, num_lanes))

    def _pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Places in the file, and the memory of ``out`` that is to be filled from there."""
        rows = self._target.view(np.uint8)
        for index, offset in _walk(self.dims[:-1], self.offset):
            row = rows[index].data
            for start in range(0, len(row), PIECE_NBYTES):
                yield offset + start, row[start : start + PIECE_NBYTES]

    @cached_property
    def _blocks(self) -> _Blocks:
        return _Blocks.of(self.dims, self.covers)

    def _run_by_scratch(self, reader: Reader, num_lanes: int) -> None:
        blocks = self._blocks
        strides = [blocks.pitch, *(dim.in_file for dim in blocks.inner)]

        def read_lane(lane: Iterable[_Block]) -> None:
            scratch = _scratch()
            memory = scratch.data
            for index, offset, num in lane:
                shift = offset % mmap.PAGESIZE  # it lies in its page as it does in the file
                num_rows, nbytes = blocks.rows_of(num)
                for row in range(num_rows):
                    start = shift + row * blocks.pitch
                    reader.fill(memory[start : start + nbytes], offset + row * blocks.cut.in_file)
                target = self._target[index]
                copy(np.ndarray(target.shape, self.dtype, scratch, shift, strides), target)

        for_each(read_lane, _lanes(lambda: blocks.walk(self.offset), num_lanes))


def copy(values: NDArray[Any], out: NDArray[Any]) -> None:
    """As ``out[...] = values``, and faster where rows are short: each is moved as one item."""
    if values.ndim and out.dtype == values.dtype:
        row_nbytes = out.shape[-1] * out.itemsize
        if row_nbytes in SHORT_ROWS and out.strides[-1] == values.strides[-1] == out.itemsize:
            values, out = values.view(f"V{row_nbytes}"), out.view(f"V{row_nbytes}")
    out[...] = values


_Block = tuple[tuple[int | slice, ...], int, int]
"""A place in the target, its offset in the file, and how many indices of the cut dim it has."""


@dataclass(frozen=True)
class _Blocks:
    """How a copy is cut into blocks that fit the scratch: ``num`` indices of ``cut`` in each.

    In the scratch, these are ``pitch`` bytes apart. They are read with one call, gaps and all, or
    if ``is_sparse`` with a call each.
    """

    outer: tuple[Dim, ...]
    cut: Dim
    inner: tuple[Dim, ...]
    num: int
    pitch: int
    is_sparse: bool
    cover: int
    """Bytes of the file from the first to the last of one index of ``cut``."""

    @classmethod
    def of(cls, dims: tuple[Dim, ...], covers: Sequence[int]) -> _Blocks:
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

    @property
    def total(self) -> int:
        return math.prod(dim.size for dim in self.outer) * -(-self.cut.size // self.num)

    def walk(self, offset: int) -> Iterator[_Block]:
        for index, start in _walk(self.outer, offset):
            for first in range(0, self.cut.size, self.num):
                last = min(first + self.num, self.cut.size)
                yield (*index, slice(first, last)), start + first * self.cut.in_file, last - first

    def rows_of(self, num: int) -> tuple[int, int]:
        """The stretches of the file that hold ``num`` indices of ``cut``, and their length."""
        return (num, self.cover) if self.is_sparse else (1, (num - 1) * self.pitch + self.cover)

    def ranges(self, offset: int) -> Iterator[Range]:
        for _, start, num in self.walk(offset):
            num_rows, nbytes = self.rows_of(num)
            for row in range(num_rows):
                yield start + row * self.cut.in_file, nbytes


def _walk(dims: Sequence[Dim], offset: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """All indices of ``dims``, and where each lies in the file."""
    indices = product(*(range(dim.size) for dim in dims))
    steps = product(*(range(0, dim.size * dim.in_file, dim.in_file) for dim in dims))
    return ((index, offset + sum(step)) for index, step in zip(indices, steps, strict=True))


def _lanes(walk: Callable[[], Iterator[T]], most: int) -> list[Iterator[T]]:
    """What ``walk`` gives, dealt out to threads in turn: to ``most`` of them at most."""
    num = max(1, min(most, num_threads()))
    return [islice(walk(), lane, None, num) for lane in range(num)]


_thread = threading.local()


def _scratch() -> NDArray[np.uint8]:
    """This thread's own, which it keeps: new memory is slow."""
    if not hasattr(_thread, "scratch"):
        _thread.scratch = empty_aligned((SCRATCH_NBYTES + 2 * mmap.PAGESIZE,), np.uint8)
    found: NDArray[np.uint8] = _thread.scratch
    return found
