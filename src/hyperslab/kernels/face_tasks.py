"""What the kernel that moves boxes is told: a row of numbers for each task.

A task is a box of a tensor ``x`` and the boxes of a buffer (its sources) that are moved to or from
it. Its dims of size 1 are dropped and dims that lie in a row merged. A program moves a tile of the
two inner dims: ``b``, innermost in the buffer, and ``a``, innermost in ``x`` where that is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Doing = Literal["pack", "unpack", "add"]
Slices = tuple[tuple[int | None, int | None, int | None], ...]
"""The start, stop and step of slices, which cannot be keys themselves."""
Spans = tuple[tuple[int, int], ...]
BLOCK = 1024
"""Numbers in a tile."""
_MAX_SIZE = 2**31 - 1
_ALIGNMENT = 16  # bytes
_MAX_CELLS = 4096


class Plan(NamedTuple):
    """The kernel's tables, on its device, and what is compiled into it."""

    tasks: Tensor
    owners: Tensor
    """The task of each program."""
    unit: int
    """Bytes moved as one number."""
    num_rest: int
    num_sources: int
    shapes: list[list[int]]
    """Of the boxes."""


class _Dim(NamedTuple):
    size: int
    stride: int
    source_strides: tuple[int, ...]

    def holds(self, inner: _Dim) -> bool:
        """Whether this dim and ``inner`` are one, in the tensor and in all sources."""
        outer = (self.stride, *self.source_strides)
        steps = (inner.stride, *inner.source_strides)
        in_a_row = all(o == inner.size * i for o, i in zip(outer, steps, strict=True))
        return in_a_row and self.size * inner.size <= _MAX_SIZE


class _Task(NamedTuple):
    start: int
    source_starts: tuple[int, ...]
    a: _Dim
    b: _Dim
    rest: tuple[_Dim, ...]

    @property
    def log_tile(self) -> int:
        """Binary logarithm of a tile's size along ``b``."""
        if abs(self.a.stride) < abs(self.b.stride):  # all of a, so that what is fetched is used
            return (BLOCK // min(_power_of_two(self.a.size), 32)).bit_length() - 1
        return min(BLOCK, _power_of_two(self.b.size)).bit_length() - 1

    @property
    def num_programs(self) -> int:
        tile = 1 << self.log_tile
        tiles = math.ceil(self.b.size / tile) * math.ceil(self.a.size / (BLOCK // tile))
        return tiles * math.prod(dim.size for dim in self.rest)

    def in_units(self, items: int) -> _Task:
        """The same with ``items`` items as one, which lie in a row along ``b``."""
        a, *rest = (
            _Dim(d.size, d.stride // items, tuple(s // items for s in d.source_strides))
            for d in (self.a, *self.rest)
        )
        starts = tuple(start // items for start in self.source_starts)
        b = self.b._replace(size=self.b.size // items)
        return _Task(self.start // items, starts, a, b, tuple(rest))

    def row(self, first: int, num_rest: int, num_sources: int) -> list[int]:
        """As the kernel reads it; what is missing has size 1, or starts before the buffer."""
        a, b, num = self.a, self.b, len(self.source_starts)
        rest = self.rest + (_Dim(1, 0, (0,) * num),) * (num_rest - len(self.rest))
        numbers = [first, self.start, a.size, b.size, self.log_tile, a.stride, b.stride]
        for dim in rest:
            numbers += [dim.size, dim.stride]
        for i, start in enumerate(self.source_starts):
            numbers += [start, *(dim.source_strides[i] for dim in (a, b, *rest))]
        return numbers + [-1] * ((num_sources - num) * (3 + num_rest))


@lru_cache(maxsize=1024)
def plan_tasks(
    doing: Doing, slices: tuple[Slices, ...], shape: tuple[int, ...], strides: tuple[int, ...],
    start: int, itemsize: int, device: torch.device,
) -> Plan | None:  # fmt: skip
    """How the boxes ``slices`` are moved, or None where they are left to torch.

    ``start`` is where the tensor begins, modulo the most that is moved as one number.
    """
    boxes = tuple(_spans(box, shape) for box in slices)
    shapes = [[stop - first for first, stop in box] for box in boxes]
    whole_steps = all(step in (None, 1) for box in slices for _, _, step in box)
    is_one_run = len(boxes) == 1 and _is_contiguous(shapes[0], strides)
    cells = _cells(boxes, doing)
    if not whole_steps or is_one_run or min(map(min, shapes)) < 1 or cells is None:
        return None
    starts = buffer_starts(shapes, itemsize)
    tasks = [_task(cell, sources, boxes, strides, starts) for cell, sources in cells]
    items = 1 if doing == "add" else _items_in_unit(tasks, start, itemsize)
    return _tabled([task.in_units(items) for task in tasks], items * itemsize, shapes, device)


View = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int]
"""A shape, with the strides and the start of a target and of its source."""


@lru_cache(maxsize=1024)
def plan_copies(views: tuple[View, ...], itemsize: int, device: torch.device) -> Plan:
    """How views of one memory are copied to those of another; none of them is empty."""
    tasks = []
    for shape, strides, start, source_strides, source_start in views:
        dims = map(_Dim, shape, strides, ((stride,) for stride in source_strides))
        a, b, rest = _roles(list(_merged(dims)), 1)
        tasks.append(_Task(start, (source_start,), a, b, rest))
    items = _items_in_unit(tasks, 0, itemsize)
    shapes = [list(shape) for shape, *_ in views]
    return _tabled([task.in_units(items) for task in tasks], items * itemsize, shapes, device)


def _tabled(tasks: list[_Task], unit: int, shapes: list[list[int]], device: torch.device) -> Plan:
    num_rest = max(len(task.rest) for task in tasks)
    num_sources = max(len(task.source_starts) for task in tasks)
    programs = [task.num_programs for task in tasks]
    firsts = accumulate(programs, initial=0)
    rows = [t.row(first, num_rest, num_sources) for t, first in zip(tasks, firsts, strict=False)]
    owners = torch.arange(len(tasks), dtype=torch.int32)
    owners = owners.repeat_interleave(torch.tensor(programs))
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    return Plan(table, owners.to(device), unit, num_rest, num_sources, shapes)


def buffer_starts(shapes: Sequence[Sequence[int]], itemsize: int) -> list[int]:
    """Where tensors of ``shapes`` begin in their buffer, and where it ends, in items."""
    step = max(1, _ALIGNMENT // itemsize)
    sizes = (math.ceil(math.prod(shape) / step) * step for shape in shapes)
    return list(accumulate(sizes, initial=0))


def _spans(box: Slices, shape: tuple[int, ...]) -> Spans:
    sizes = zip(box, shape, strict=True)
    return tuple(slice(start, stop).indices(size)[:2] for (start, stop, _), size in sizes)


def _is_contiguous(sizes: list[int], strides: tuple[int, ...]) -> bool:
    steps = zip(sizes, strides, _contiguous(sizes), strict=True)
    return all(stride == step for size, stride, step in steps if size > 1)


def _cells(boxes: tuple[Spans, ...], doing: Doing) -> list[tuple[Spans, list[int]]] | None:
    """Boxes that do not overlap, each with the numbers of those of ``boxes`` that hold it."""
    overlap = any(_overlap(one, two) for i, one in enumerate(boxes) for two in boxes[:i])
    if doing == "pack" or not overlap:
        return [(box, [i]) for i, box in enumerate(boxes)]
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    if math.prod(len(edges) - 1 for edges in cuts) > _MAX_CELLS:
        return None
    last = slice(-1, None) if doing == "unpack" else slice(None)
    cells = ((cell, _holders(cell, boxes)[last]) for cell in product(*map(pairwise, cuts)))
    return [(cell, holders) for cell, holders in cells if holders]


def _overlap(one: Spans, two: Spans) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, two, strict=True))


def _holders(cell: Spans, boxes: tuple[Spans, ...]) -> list[int]:
    return [number for number, box in enumerate(boxes) if _overlap(cell, box)]


def _task(
    cell: Spans,
    sources: list[int],
    boxes: tuple[Spans, ...],
    strides: tuple[int, ...],
    starts: list[int],
) -> _Task:
    layouts = [_contiguous([stop - first for first, stop in boxes[i]]) for i in sources]
    begins = [[first for first, _ in boxes[i]] for i in sources]
    source_starts = tuple(
        starts[i] + sum((c[0] - b) * s for c, b, s in zip(cell, begin, layout, strict=True))
        for i, begin, layout in zip(sources, begins, layouts, strict=True)
    )
    start = sum(first * stride for (first, _), stride in zip(cell, strides, strict=True))
    sizes = [stop - first for first, stop in cell]
    dims = list(_merged(map(_Dim, sizes, strides, zip(*layouts, strict=True))))
    a, b, rest = _roles(dims, len(sources))
    return _Task(start, source_starts, a, b, rest)


def _contiguous(sizes: list[int]) -> list[int]:
    return list(accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1))[::-1]


def _merged(dims: Iterator[_Dim]) -> Iterator[_Dim]:
    """``dims`` without those of size 1, and with those that lie in a row as one."""
    outer: _Dim | None = None
    for dim in dims:
        if dim.size == 1:
            continue
        if outer and outer.holds(dim):
            outer = dim._replace(size=outer.size * dim.size)
            continue
        if outer:
            yield outer
        outer = dim
    if outer:
        yield outer


def _roles(dims: list[_Dim], num_sources: int) -> tuple[_Dim, _Dim, tuple[_Dim, ...]]:
    """The dims ``a`` and ``b``, and the rest, inner ones first."""
    nothing = _Dim(1, 0, (0,) * num_sources)
    if not dims:
        return nothing, nothing._replace(stride=1, source_strides=(1,) * num_sources), ()
    *others, b = dims
    if not others:
        return nothing._replace(stride=b.stride * b.size), b, ()
    nearest = min(others, key=lambda dim: abs(dim.stride))
    a = nearest if abs(nearest.stride) < abs(b.stride) else others[-1]
    return a, b, tuple(dim for dim in reversed(others) if dim is not a)


def _items_in_unit(tasks: list[_Task], start: int, itemsize: int) -> int:
    """How many items can be moved as one number, of at most 8 bytes."""
    if any({task.b.stride, *task.b.source_strides} != {1} for task in tasks):
        return 1
    steps = [start]
    for task in tasks:
        steps += [task.b.size, task.start, *task.source_starts]
        for dim in (task.a, *task.rest):
            steps += [dim.stride, *dim.source_strides] if dim.size > 1 else []
    return math.gcd(8 // itemsize, *steps)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
