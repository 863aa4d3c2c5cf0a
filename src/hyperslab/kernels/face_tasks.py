"""What the kernel that moves boxes is told: a row of numbers for each task.

A task is a box of a target and the boxes (its sources) that are moved there, or added to it. Its
dims of size 1 are dropped and dims that lie in a row merged. A program moves a tile of the two
inner dims: ``b``, innermost in the target, and ``a``, innermost in the source if that is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hyperslab.kernels.fused import Launch, power_of_two

Strides = tuple[int, ...]
BLOCK = 1024
"""Numbers in a tile."""
FILL, OWN, RECEIVED = range(3)
"""Where a task's numbers come from."""
_MAX_SIZE = 2**31 - 1


class Dim(NamedTuple):
    """One dim of a task's box, in its target and its sources."""

    size: int
    stride: int
    source_strides: Strides

    def holds(self, inner: Dim) -> bool:
        """Whether this dim and ``inner`` are one, in the target and in all sources."""
        outer = (self.stride, *self.source_strides)
        steps = (inner.stride, *inner.source_strides)
        in_a_row = all(o == inner.size * i for o, i in zip(outer, steps, strict=True))
        return in_a_row and self.size * inner.size <= _MAX_SIZE


class Task(NamedTuple):
    """A box that is not empty, in items."""

    origin: int
    start: int
    source_starts: tuple[int, ...]
    a: Dim
    b: Dim
    rest: tuple[Dim, ...]

    @classmethod
    def of(cls, origin: int, start: int, source_starts: Sequence[int], dims: Iterable[Dim]) -> Task:
        """The one of a box with ``dims``, whatever their order in memory."""
        a, b, rest = _roles(list(_merged(dims)), len(source_starts))
        return cls(origin, start, tuple(source_starts), a, b, rest)

    @property
    def log_tile(self) -> int:
        """Binary logarithm of a tile's size along ``b``."""
        if abs(self.a.source_strides[0]) < abs(self.b.source_strides[0]):
            # All of a, so that what is fetched is used.
            return (BLOCK // min(power_of_two(self.a.size), 32)).bit_length() - 1
        return min(BLOCK, power_of_two(self.b.size)).bit_length() - 1

    @property
    def num_programs(self) -> int:
        tile = 1 << self.log_tile
        tiles = math.ceil(self.b.size / tile) * math.ceil(self.a.size / (BLOCK // tile))
        return tiles * math.prod(dim.size for dim in self.rest)

    def in_units(self, items: int) -> Task:
        """The same with ``items`` items as one, which lie in a row along ``b``."""
        a, *rest = (
            Dim(d.size, d.stride // items, tuple(s // items for s in d.source_strides))
            for d in (self.a, *self.rest)
        )
        starts = tuple(start // items for start in self.source_starts)
        b = self.b._replace(size=self.b.size // items)
        return Task(self.origin, self.start // items, starts, a, b, tuple(rest))

    def row(self, first: int, num_rest: int, num_sources: int, fill: int) -> list[int]:
        """As the kernel reads it; what is missing has size 1, or starts before the source."""
        a, b, num = self.a, self.b, len(self.source_starts)
        rest = self.rest + (Dim(1, 0, (0,) * num),) * (num_rest - len(self.rest))
        numbers = [first, self.start, a.size, b.size, self.log_tile, a.stride, b.stride]
        numbers += [self.origin, fill if self.origin == FILL else 0]
        for dim in rest:
            numbers += [dim.size, dim.stride]
        for i, start in enumerate(self.source_starts):
            numbers += [start, *(dim.source_strides[i] for dim in (a, b, *rest))]
        return numbers + [-1] * ((num_sources - num) * (3 + num_rest))


class Tables(NamedTuple):
    """Tasks as the kernel reads them, on its device."""

    rows: Tensor
    owners: Tensor
    """The task of every tile."""
    num_rest: int
    num_sources: int


def task_tables(tasks: Sequence[Task], device: torch.device, fill: int = 0) -> Tables:
    """``tasks``, with ``fill`` where nothing is moved."""
    num_rest = max(len(task.rest) for task in tasks)
    num_sources = max(len(task.source_starts) for task in tasks)
    programs = [task.num_programs for task in tasks]
    firsts = accumulate(programs, initial=0)
    rows = [
        task.row(first, num_rest, num_sources, fill)
        for task, first in zip(tasks, firsts, strict=False)
    ]
    owners = torch.arange(len(tasks), dtype=torch.int32)
    owners = owners.repeat_interleave(torch.tensor(programs))
    found = torch.tensor(rows, dtype=torch.int64)
    return Tables(found.to(device), owners.to(device), num_rest, num_sources)


class Moves:
    """Tasks, ready to be run by one kernel."""

    def __init__(
        self, tasks: Sequence[Task], unit: int | None, device: torch.device, fill: int = 0
    ) -> None:
        """Numbers of ``unit`` bytes are moved, or items added where it is None."""
        from hyperslab.kernels.gpu.faces import UNITS, move_boxes

        tables = task_tables(tasks, device, fill)
        self.unit = unit
        self.tables = tables.rows, tables.owners
        sizes = {"num_rest": tables.num_rest, "num_sources": tables.num_sources, "block": BLOCK}
        self.launch = Launch(
            move_boxes, (len(tables.owners),), device, (), {"unit": unit and UNITS[unit], **sizes}
        )

    def __call__(self, target: Tensor, own: Tensor, received: Tensor) -> None:
        """Each tensor stands for its memory, from its first number on."""
        self.launch(target, own, received, *self.tables)


def items_in_unit(tasks: Sequence[Task], start: int, itemsize: int) -> int:
    """How many items can be moved as one number, of at most 8 bytes.

    ``start`` is that of the own tensor, in items.
    """
    if any({task.b.stride, *task.b.source_strides} != {1} for task in tasks):
        return 1
    steps = [start]
    for task in tasks:
        steps += [task.b.size, task.start, *task.source_starts]
        for dim in (task.a, *task.rest):
            steps += [dim.stride, *dim.source_strides] if dim.size > 1 else []
    return math.gcd(8 // itemsize, *steps)


def _merged(dims: Iterable[Dim]) -> Iterator[Dim]:
    """``dims`` as they lie in the target, outer ones first; those that lie in a row as one."""
    outer: Dim | None = None
    long = [dim for dim in dims if dim.size > 1]
    for dim in sorted(long, key=lambda dim: -abs(dim.stride)):
        if outer and outer.holds(dim):
            outer = dim._replace(size=outer.size * dim.size)
            continue
        if outer:
            yield outer
        outer = dim
    if outer:
        yield outer


def _roles(dims: list[Dim], num_sources: int) -> tuple[Dim, Dim, tuple[Dim, ...]]:
    """The dims ``a`` and ``b``, and the rest, inner ones first."""
    nothing = Dim(1, 0, (0,) * num_sources)
    if not dims:
        return nothing, nothing._replace(stride=1, source_strides=(1,) * num_sources), ()
    *others, b = dims
    if not others:
        return nothing._replace(source_strides=b.source_strides), b, ()
    nearest = min(others, key=lambda dim: abs(dim.source_strides[0]))
    a = nearest if abs(nearest.source_strides[0]) < abs(b.source_strides[0]) else others[-1]
    return a, b, tuple(dim for dim in reversed(others) if dim is not a)
