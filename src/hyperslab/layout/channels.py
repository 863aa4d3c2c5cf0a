"""Which channels and filters of a convolution belong together, and which of them ranks move.

A filter reads the channels of its group. So a rank that keeps some filters needs the channels of
their groups (*filter split*), and one that keeps some channels adds to all filters of their groups
(*channel split*).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hyperslab.layout.box import Span
from hyperslab.layout.exchange import Exchange, plan_exchange
from hyperslab.layout.layout import Grid, Layout, Split


class Run(NamedTuple):
    """Channels and filters that one call convolves, of whole groups or of a part of one."""

    channels: Span
    filters: Span
    num_groups: int


@dataclass(frozen=True)
class Groups:
    """``num`` groups of as many channels and as many filters each."""

    channels: int
    filters: int
    num: int

    def reads(self, filters: Span) -> Span:
        """The channels that ``filters`` read.

        >>> Groups(channels=8, filters=4, num=2).reads(Span(1, 2))
        Span(start=0, stop=4)
        """
        return _in_groups(filters, self.filters // self.num, self.channels // self.num)

    def writes(self, channels: Span) -> Span:
        """The filters that read any of ``channels``."""
        return _in_groups(channels, self.channels // self.num, self.filters // self.num)

    def runs_of_filters(self, filters: Span) -> tuple[Run, ...]:
        """The calls that compute ``filters`` from the channels that they read."""
        parts = _by_groups(filters, self.filters // self.num)
        return tuple(Run(self.reads(part), part, num) for part, num in parts)

    def runs_of_channels(self, channels: Span) -> tuple[Run, ...]:
        """The calls that compute what ``channels`` add to the filters that read them."""
        parts = _by_groups(channels, self.channels // self.num)
        return tuple(Run(part, self.writes(part), num) for part, num in parts)


def _in_groups(span: Span, each: int, other: int) -> Span:
    """All of the groups of ``each`` that ``span`` touches, where they have ``other`` members."""
    if not span.size:
        return Span(0, 0)
    return Span(span.start // each * other, -(-span.stop // each) * other)


def _by_groups(span: Span, each: int) -> list[tuple[Span, int]]:
    """``span`` cut where groups of ``each`` are whole; with each part the number of its groups.

    >>> _by_groups(Span(1, 9), 3)
    [(Span(start=1, stop=3), 1), (Span(start=3, stop=9), 2)]
    """
    first, last = -(-span.start // each) * each, span.stop // each * each
    if first > last:  # within one group
        bounds = [(span.start, span.stop, 1)]
    else:
        whole = (last - first) // each
        bounds = [(span.start, first, 1), (first, last, whole), (last, span.stop, 1)]
    return [(Span(start, stop), num) for start, stop, num in bounds if start < stop]


@lru_cache(maxsize=4096)
def plan_gather_channels(
    grid: Grid, rank: int, source: Layout, groups: Groups, filters: Split
) -> Exchange:
    """How ``rank`` gets the channels, dim 1 of ``source``, that its ``filters`` read."""
    wanted = [
        source.box(coords).with_span(1, groups.reads(filters.cuts.spans[coords[filters.axis]]))
        for coords in grid.coords
    ]
    return plan_exchange(grid, rank, source, wanted)


@lru_cache(maxsize=4096)
def plan_scatter_filters(
    grid: Grid, rank: int, output: Layout, groups: Groups, channels: Split
) -> Exchange:
    """Whose adjoint adds what each rank's ``channels`` make of filters at those who own them.

    ``output`` is cut along its filters, dim 1.
    """
    made = [
        output.box(coords).with_span(1, groups.writes(channels.cuts.spans[coords[channels.axis]]))
        for coords in grid.coords
    ]
    return plan_exchange(grid, rank, output, made)
