"""Which box of every array each rank holds, and which samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from hyperslab.io import ArraySpec
from hyperslab.io.rank_boxes import check_cuts, sample_layout
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
    ) -> Placement:
        """Every array cut evenly, or at ``cuts``, along the axes of its dims."""
        check_cuts(next(iter(arrays.values())), grid)
        layouts = {name: sample_layout(spec, grid, cuts) for name, spec in arrays.items()}
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
