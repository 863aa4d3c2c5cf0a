"""Which box of every array each rank takes, which samples of a batch, and which it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from hyperslab.io import ArraySpec
from hyperslab.io.schedule import Indices, Schedule
from hyperslab.io.spec import check_cuts, sample_layout
from hyperslab.layout import Box, Cuts, Grid, Layout, Span, Split, cut_evenly


@dataclass(frozen=True)
class Placement:
    """The arrays of a dataset over the ranks of ``grid``, as ``rank`` sees them.

    Every rank takes the same box of all the samples that come to it; ranks that differ along the
    sample axis take other samples of a batch.
    """

    grid: Grid
    rank: int
    arrays: Mapping[str, ArraySpec]
    layouts: Mapping[str, Layout]
    """Of one sample, by array."""
    # Every batch asks for the same few again, while all cores read.
    _boxes: dict[tuple[str, int], Box] = field(default_factory=dict, repr=False, compare=False)
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict, repr=False, compare=False)
    _batch_layouts: dict[tuple[str, tuple[int, ...]], Layout] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        grid: Grid,
        rank: int,
        arrays: Mapping[str, ArraySpec],
        cuts: Mapping[str, Sequence[int]] | None = None,
        known: Mapping[str, Layout] | None = None,
    ) -> Placement:
        """Arrays cut evenly, or at ``cuts``, along the axes of their dims; some as is ``known``."""
        known = known or {}
        if (sample := next(iter(arrays.values()))).name not in known:
            check_cuts(sample, grid)
        layouts = {
            name: known[name] if name in known else sample_layout(spec, grid, cuts)
            for name, spec in arrays.items()
        }
        return cls(grid, rank, arrays, layouts)

    @cached_property
    def num_shares(self) -> int:
        """The ranks along the sample axis, each of which takes its share of a batch."""
        return self.grid.size("sample")

    @cached_property
    def share(self) -> int:
        return self.share_of(self.rank)

    def share_of(self, rank: int) -> int:
        return self.grid.coords[rank]["sample"]

    def box(self, array: str, rank: int | None = None) -> Box:
        """What a rank (this one, if not given) takes of every sample."""
        rank = self.rank if rank is None else rank
        found = self._boxes.get((array, rank))
        if found is None:
            found = self._boxes[array, rank] = self.layouts[array].box(self.grid.coords[rank])
        return found

    def spans(self, num: int) -> tuple[Span, ...]:
        """Which of the ``num`` samples of a batch go to each share."""
        found = self._spans.get(num)
        if found is None:
            found = self._spans[num] = cut_evenly(num, self.num_shares).spans
        return found

    def batch_layout(self, array: str, sizes: tuple[int, ...]) -> Layout:
        """The layout of a batch of which each share has taken as many samples as ``sizes`` say."""
        found = self._batch_layouts.get((array, sizes))
        if found is None:
            one = self.layouts[array]
            cuts = Cuts(tuple(accumulate(sizes, initial=0)))
            split = Split("sample", cuts) if self.num_shares > 1 else None
            found = Layout((cuts.extent, *one.shape), (split, *one.splits))
            self._batch_layouts[array, sizes] = found
        return found

    @cached_property
    def ranks_by_share(self) -> list[list[int]]:
        """The ranks that take each share; those at the same place in two lists hold like boxes."""
        shares: list[list[int]] = [[] for _ in range(self.num_shares)]
        for rank in range(self.grid.num_ranks):
            shares[self.share_of(rank)].append(rank)
        return shares

    def holders(self, array: str, share: int, box: Box, taker: int) -> list[tuple[int, Box]]:
        """The ranks of ``share`` that hold ``box`` of an array together, and the part of each.

        That is the one beside ``taker``, where it holds all of it.
        """
        ranks = self.ranks_by_share[share]
        beside = ranks[self.ranks_by_share[self.share_of(taker)].index(taker)]
        if self.box(array, beside).contains(box):
            return [(beside, box)]
        channel = self.grid.coords[taker]["channel"]
        parts = [
            (rank, self.box(array, rank) & box)
            for rank in ranks
            if self.grid.coords[rank]["channel"] == channel
        ]
        return [(rank, part) for rank, part in parts if part]


@dataclass(frozen=True)
class Owners:
    """The share of the ranks that keeps each sample, and which of that share's samples it is."""

    shares: Indices
    numbers: Indices

    def num_owned(self, share: int) -> int:
        return int((self.shares == share).sum())


def assign_owners(schedule: Schedule, num_shares: int, epoch: int) -> Owners:
    """Every sample belongs to the share that takes it in ``epoch``, in the order of that epoch.

    So ranks that begin there with empty hands read what they keep, and nothing moves until the
    next epoch.
    """
    order = replace(schedule, drop_last=False).order(epoch)
    takers = np.empty(len(order), np.int64)
    size = schedule.batch_size
    num_whole = len(order) // size * size
    takers[:num_whole] = np.tile(_takers(size, num_shares), num_whole // size)
    takers[num_whole:] = _takers(len(order) - num_whole, num_shares)
    numbers = np.empty(len(order), np.int64)
    for share in range(num_shares):
        mine = takers == share
        numbers[mine] = np.arange(mine.sum())
    shares = np.empty_like(takers)
    shares[order] = takers
    by_sample = np.empty_like(numbers)
    by_sample[order] = numbers
    return Owners(shares, by_sample)


def _takers(num: int, num_shares: int) -> Indices:
    """The share that takes each of the ``num`` samples of a batch."""
    sizes = [span.size for span in cut_evenly(num, num_shares).spans]
    return np.repeat(np.arange(num_shares), sizes)
