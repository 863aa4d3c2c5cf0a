"""Slices, mirrors and lists of indices: each output is one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from hyperslab.layout.box import Box, Span
from hyperslab.layout.exchange import Exchange, plan_exchange
from hyperslab.layout.layout import Grid, Layout, Split
from hyperslab.layout.window import output_cuts

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Strided:
    """Output ``o`` is input ``indices[o]``: a slice, or the dim backwards."""

    indices: range

    def output_extent(self, extent: int) -> int:
        return len(self.indices)

    def reads(self, output: Span) -> Span:
        picked = self.indices[output.start : output.stop]
        if not picked:
            return Span(0, 0)
        ends = picked[0], picked[-1]
        return Span(min(ends), max(ends) + 1)

    def output_cut(self, cut: int) -> int:
        """A rank owns as many outputs as it owns inputs that are picked."""
        rising = self.indices if self.indices.step > 0 else self.indices[::-1]
        return len(range(rising.start, min(cut, rising.stop), rising.step))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Output ``o`` is input ``indices[o]``; runs of ``block`` outputs stay on one rank."""

    indices: tuple[int, ...]
    block: int = 1

    def output_extent(self, extent: int) -> int:
        return len(self.indices)

    def reads(self, output: Span) -> Span:
        chosen = self.indices[output.start : output.stop]
        return Span(min(chosen), max(chosen) + 1) if chosen else Span(0, 0)

    def output_cut(self, cut: int) -> int:
        """A rank owns as many outputs as there are choices of inputs that it owns."""
        return sum(index < cut for index in self.indices) // self.block * self.block


Entry = int | range | None
"""What is taken along a dim: one index, which drops the dim, or a slice; None is a new dim."""

Local = tuple[int | slice | None, ...]
"""An index of a rank's piece."""


class Indexed(NamedTuple):
    """How one rank takes its part of ``x[index]``.

    It is ``fetch(piece[before], exchange)[after]``, and ``piece[direct]`` where no rank lacks
    anything.
    """

    output: Layout
    moves: bool
    """Whether some rank needs what it does not hold."""
    is_part: bool
    """Whether it leaves out indices of a split dim."""
    exchange: Exchange
    direct: Local
    before: Local
    after: Local


@lru_cache(maxsize=4096)
def plan_index(grid: Grid, rank: int, source: Layout, index: tuple[Entry, ...]) -> Indexed:
    """The plan of ``x[index]``, whose entries other than None are in range, one a dim.

    A slice along a split dim leaves each index with its owner. One index of a split dim goes to all
    ranks along its axis.
    """
    picks = [entry for entry in index if entry is not None]
    dims = [_Dim(pick, split) for pick, split in zip(picks, source.splits, strict=True)]
    narrowed = Layout(
        tuple(
            extent if dim.split else len(dim.run)
            for dim, extent in zip(dims, source.shape, strict=True)
        ),
        source.splits,
    )
    taken = Layout(tuple(len(dim.run) for dim in dims), tuple(dim.output_split for dim in dims))

    def reads(coords: Mapping[str, int]) -> Box:
        spans = zip(dims, taken.box(coords).spans, strict=True)
        return Box(tuple(dim.reads(span) for dim, span in spans))

    exchange = plan_exchange(grid, rank, narrowed, [reads(coords) for coords in grid.coords])
    pairs = zip(dims, exchange.wanted.spans, exchange.owned.spans, strict=True)
    kept = [dim for dim in index if not isinstance(dim, int)]
    return Indexed(
        Layout(
            tuple(1 if entry is None else len(entry) for entry in kept),
            tuple(_with_new_dims([dim.output_split for dim in dims if dim.is_kept], kept)),
        ),
        any(dim.split and not dim.is_kept for dim in dims),
        taken.split_dims != source.split_dims
        or any(taken.shape[dim] != source.shape[dim] for dim in source.split_dims),
        exchange,
        tuple(_with_new_dims([dim.direct(span, own.start) for dim, span, own in pairs], index)),
        tuple(dim.before for dim in dims),
        tuple(_with_new_dims([dim.after for dim in dims], index)),
    )


class _Dim(NamedTuple):
    """What an index does along one dim of its input."""

    pick: int | range
    split: Split | None

    @property
    def is_kept(self) -> bool:
        return isinstance(self.pick, range)

    @property
    def run(self) -> range:
        return self.pick if isinstance(self.pick, range) else range(self.pick, self.pick + 1)

    @property
    def output_split(self) -> Split | None:
        if self.split is None or not self.is_kept:
            return None
        return Split(self.split.axis, output_cuts(Strided(self.run), self.split.cuts))

    def reads(self, output: Span) -> Span:
        return Strided(self.run).reads(output) if self.split else output

    def direct(self, wanted: Span, origin: int) -> int | slice:
        """The index of a piece that holds all of ``wanted`` and begins at ``origin``."""
        if isinstance(self.pick, int):
            return wanted.start - origin if self.split else self.pick
        held = wanted.slice_from(origin)
        return slice(held.start, held.stop, self.run.step) if self.split else self.before

    @property
    def before(self) -> slice:
        if self.split:
            return slice(None)
        return slice(self.run.start, self.run.stop, self.run.step) if self.run else slice(0, 0)

    @property
    def after(self) -> int | slice:
        if isinstance(self.pick, int):
            return 0
        return slice(None, None, self.pick.step if self.split else None)


def _with_new_dims(items: Sequence[Item], index: Sequence[object | None]) -> Iterator[Item | None]:
    """The items of an index's input dims, in order, and None for each dim that it adds."""
    rest = iter(items)
    return (None if entry is None else next(rest) for entry in index)
