"""A box on its way from a file into a buffer."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, product
from operator import mul
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyperslab.io.engine.buffers import address_of, empty_aligned
from hyperslab.io.engine.read_ahead import GAP_NBYTES, MAX_ROWS, Range
from hyperslab.io.engine.threads import for_each, num_threads

T = TypeVar("T")

DIRECT_NBYTES = 16 << 10
"""Runs at least this long are read straight into place: a call costs as much as 16 KiB copied."""
SCRATCH_NBYTES = 2 << 20
"""Read at a time where runs are shorter; stays in the cache until it is copied out."""
PIECE_NBYTES = 4 << 20
"""Longer runs are read in pieces of this size, by several threads."""
LONE_PIECE_NBYTES = 32 << 20
"""The same for one thread, which gains by fewer calls."""
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
    """What a copy reads with."""

    def fill_rows(self, rows: NDArray[np.uint8], offset: int, step: int) -> None:
        """Fills each of ``rows``: the first from ``offset`` on, the next from ``step`` later."""


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
class Loops:
    """How boxes of one shape are copied, wherever they begin."""

    dtype: np.dtype[Any]
    """In the file."""
    dims: tuple[Dim, ...]
    """The last varies fastest in the file."""

    @cached_property
    def covers(self) -> tuple[int, ...]:
        """Bytes of the file from the first to the last item of ``dims[n:]``, for every ``n``."""
        sizes = [(dim.size - 1) * dim.in_file for dim in self.dims]
        return tuple(sum(sizes[n:]) + self.dtype.itemsize for n in range(len(sizes) + 1))

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Bytes of the file that are left out between one index and the next, for every dim."""
        pairs = zip(self.dims, self.covers[1:], strict=True)
        return tuple(dim.in_file - cover for dim, cover in pairs)

    @cached_property
    def run_nbytes(self) -> int:
        """The length of the runs of the file that are runs of the buffer too; 0 if none is."""
        run = self.dims[-1]
        is_run = self.dtype.isnative and run[1:] == (self.dtype.itemsize,) * 2
        return run.size * run.in_file if is_run else 0

    @cached_property
    def target(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the buffer, with ``dims`` for its dims."""
        return tuple(dim.size for dim in self.dims), tuple(dim.in_out for dim in self.dims)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The same sizes, at least two: runs are the rows of a matrix, if only of one row."""
        sizes, _ = self.target
        return (1,) * (2 - len(sizes)) + sizes

    @cached_property
    def row_step(self) -> int:
        """Bytes of the file from one run to the next, along the dim before the last."""
        return self.dims[-2].in_file if len(self.dims) > 1 else 0

    @cached_property
    def is_run(self) -> bool:
        """Whether the buffer is one run of items in the order of the file, and of its dtype."""
        sizes, strides = self.target
        return self.dtype.isnative and strides == strides_of(sizes, self.dtype)

    @cached_property
    def blocks(self) -> _Blocks:
        return _Blocks.of(self)


@lru_cache(1024)
def _loops(
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    in_file: tuple[int, ...],
    in_out: tuple[int, ...],
) -> Loops:
    """Of a box of ``shape``, given the strides; most chunks of a box have the same."""
    dims = merged(map(Dim, shape, in_file, in_out))
    return Loops(dtype, dims or (Dim(1, dtype.itemsize, dtype.itemsize),))


class BoxCopy(NamedTuple):
    """A copy from ``offset`` in a file to the first item of ``out``."""

    offset: int
    loops: Loops
    out: NDArray[Any]

    @classmethod
    def of(
        cls,
        first: int,
        dtype: np.dtype[Any],
        strides: tuple[int, ...],
        starts: Iterable[int],
        out: NDArray[Any],
    ) -> BoxCopy:
        """Of a box of the shape of ``out`` that begins at the indices ``starts``.

        ``strides`` are those of the array in the file, whose first item lies at ``first``.
        """
        offset = first + sum(map(mul, starts, strides))
        return cls(offset, _loops(dtype, out.shape, strides, out.strides), out)

    @property
    def is_direct(self) -> bool:
        """Whether runs are read straight into ``out``: if they are long, or there is but one."""
        nbytes = self.loops.run_nbytes
        if nbytes < DIRECT_NBYTES:
            return nbytes > 0 and len(self.loops.dims) == 1
        return (address_of(self.out) - self.offset) % mmap.PAGESIZE not in SLOW_COPY

    @property
    def is_short(self) -> bool:
        """Whether its reads are too short to be shared out to threads."""
        loops = self.loops
        if not self.is_direct:
            return loops.blocks.is_sparse and loops.blocks.cover < SHORT_NBYTES
        is_row_a_call = len(loops.dims) > 1 and loops.gaps[-2] > GAP_NBYTES
        return is_row_a_call and loops.run_nbytes < SHORT_NBYTES

    def is_all_until(self, stop: int) -> bool:
        """Whether it reads everything from its first byte to byte ``stop``, small gaps aside."""
        return max(*self.loops.gaps, stop - self.offset - self.loops.covers[0]) <= GAP_NBYTES

    def run(self, reader: Reader, max_threads: int = MAX_THREADS) -> None:
        """Reads with ``reader``, on ``max_threads`` threads at most."""
        most = min(num_threads(), max_threads)
        if most > 1 and self.is_short:
            most = 1
        if self.is_direct:
            self._run_direct(reader, min(most, self.out.nbytes // PIECE_NBYTES))
        else:
            self._run_by_scratch(reader, min(most, self.loops.blocks.total))

    def ranges(self) -> Iterator[Range]:
        """What is read of the file, in order."""
        if not self.is_direct:
            return self.loops.blocks.ranges(self.offset)
        return (
            (offset + row * self.loops.row_step, rows.shape[1])
            for offset, rows in self._rows()
            for row in range(len(rows))
        )

    @property
    def target(self) -> NDArray[Any]:
        """``out``, with ``dims`` for its dims."""
        return self.out.reshape(self.loops.target[0])  # a view: dims were merged by its strides

    def _run_direct(self, reader: Reader, num_lanes: int) -> None:
        def read_lane(lane: Iterable[tuple[int, NDArray[np.uint8]]]) -> None:
            for offset, rows in lane:
                reader.fill_rows(rows, offset, self.loops.row_step)

        if num_lanes <= 1:
            read_lane(self._rows())
        else:
            for_each(read_lane, _lanes(self._rows, num_lanes))

    def _rows(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Places in the file, and the rows of ``out`` that are to be filled from there."""
        nbytes, step = self.loops.run_nbytes, self.loops.row_step
        target = self.out.reshape(self.loops.row_shape).view(np.uint8)
        is_lone = num_threads() == 1 or self.is_short
        most = LONE_PIECE_NBYTES if is_lone else PIECE_NBYTES
        num = min(MAX_ROWS, max(1, most // nbytes))
        for index, offset in walk(self.loops.dims[:-2], self.offset):
            rows = target[index]
            for first in range(0, len(rows), num):
                for start in range(0, nbytes, most):
                    piece = rows[first : first + num, start : start + most]
                    yield offset + first * step + start, piece

    def _run_by_scratch(self, reader: Reader, num_lanes: int) -> None:
        blocks, dtype, target = self.loops.blocks, self.loops.dtype, self.target

        def read_lane(lane: Iterable[_Block]) -> None:
            scratch = _scratch()
            for index, offset, num in lane:
                shift = offset % mmap.PAGESIZE  # it lies in its page as it does in the file
                rows = np.ndarray(blocks.rows_of(num), np.uint8, scratch, shift, (blocks.pitch, 1))
                reader.fill_rows(rows, offset, blocks.cut.in_file)
                part = target[index]
                copy(np.ndarray(part.shape, dtype, scratch, shift, blocks.strides), part)

        if num_lanes <= 1:
            read_lane(blocks.walk(self.offset))
        else:
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
    def of(cls, loops: Loops) -> _Blocks:
        dims, covers = loops.dims, loops.covers
        joined = len(dims)  # dims from here on are read with one call
        while joined and covers[joined] <= SCRATCH_NBYTES and loops.gaps[joined - 1] <= GAP_NBYTES:
            joined -= 1
        is_sparse = joined > 0 and covers[joined] <= SCRATCH_NBYTES
        place = joined - is_sparse
        cut, cover = dims[place], covers[place + 1]
        # A pitch that keeps every slot at the place in its page that it has in the file.
        pitch = cover + (cut.in_file - cover) % mmap.PAGESIZE if is_sparse else cut.in_file
        num = max(1, min(cut.size, (SCRATCH_NBYTES - cover) // pitch + 1))
        return cls(dims[:place], cut, dims[place + 1 :], num, pitch, is_sparse, cover)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Of a block in the scratch."""
        return (self.pitch, *(dim.in_file for dim in self.inner))

    @cached_property
    def total(self) -> int:
        return math.prod(dim.size for dim in self.outer) * -(-self.cut.size // self.num)

    def walk(self, offset: int) -> Iterator[_Block]:
        for index, start in walk(self.outer, offset):
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


def walk(dims: Sequence[Dim], offset: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """All indices of ``dims``, and where each lies in the file."""
    if not dims:
        return iter([((), offset)])
    indices = product(*(range(dim.size) for dim in dims))
    steps = product(*(range(0, dim.size * dim.in_file, dim.in_file) for dim in dims))
    return ((index, offset + sum(step)) for index, step in zip(indices, steps, strict=True))


def _lanes(walk: Callable[[], Iterator[T]], num: int) -> list[Iterator[T]]:
    """What ``walk`` gives, dealt out in turn to ``num`` threads."""
    return [islice(walk(), lane, None, num) for lane in range(num)]


_thread = threading.local()


def _scratch() -> NDArray[np.uint8]:
    """This thread's own, which it keeps: new memory is slow."""
    if not hasattr(_thread, "scratch"):
        _thread.scratch = empty_aligned((SCRATCH_NBYTES + 2 * mmap.PAGESIZE,), np.uint8)
    found: NDArray[np.uint8] = _thread.scratch
    return found
