"""What each rank of a mesh reads of one sample, and whether the files make that expensive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add

from hyperslab.io.dataset import Dataset
from hyperslab.io.info.describe import shown_shape
from hyperslab.io.info.reads import NOTHING, ReadCost, read_cost
from hyperslab.io.partial import shown_nbytes
from hyperslab.io.rank_boxes import check_cuts, rank_boxes
from hyperslab.io.tiled import untiled
from hyperslab.layout import Box, Grid

MAX_AMPLIFICATION = 1.25
SMALL_NBYTES = 16 << 10
"""Chunks below this cost more by their number than by their bytes."""
MANY_READS = 1000
FREE_NBYTES = 1 << 16
"""To read or decode so little takes no longer than to read less."""
LARGE_NBYTES = 64 << 20
"""Chunks above this are slow to begin with, and no two threads can share one."""


@dataclass(frozen=True)
class RankReads:
    """What one rank reads of one sample."""

    rank: int
    box: Box
    """Of the sample itself, channels first."""
    cost: ReadCost
    """Of all arrays together."""


@dataclass(frozen=True)
class MeshReads:
    """What all ranks read of one sample."""

    grid: Grid
    ranks: tuple[RankReads, ...]

    def spread(self, value: Callable[[ReadCost], float]) -> tuple[float, float, float]:
        """The least, the mean and the most over the ranks."""
        values = [value(each.cost) for each in self.ranks]
        return min(values), sum(values) / len(values), max(values)

    @property
    def worst(self) -> RankReads:
        return max(self.ranks, key=lambda each: each.cost.amplification)


def mesh_reads(dataset: Dataset, grid: Grid, index: int = 0) -> MeshReads:
    """What each rank of ``grid`` reads of sample ``index``."""
    check_cuts(dataset.spec, grid)
    _, number = dataset.place_of(index)
    ranks = []
    for rank in range(grid.num_ranks):
        boxes = rank_boxes(dataset, grid, [rank])
        costs = [
            read_cost(dataset.reader(index, name), spec.axes.file_box(number, boxes[name]))
            for name, spec in dataset.arrays.items()
        ]
        ranks.append(RankReads(rank, boxes[dataset.spec.name], reduce(add, costs, NOTHING)))
    return MeshReads(grid, tuple(ranks))


def find_trouble(dataset: Dataset, reads: MeshReads | None, index: int = 0) -> list[str]:
    """What makes reading boxes slow, in words; all of it is mended by rewriting the files."""
    found = []
    for name, spec in dataset.arrays.items():
        storage = untiled(dataset.reader(index, name)).storage()
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        chunk = math.prod(storage.chunks or ()) * spec.dtype.itemsize
        shown = f"{name} is in chunks of {shown_shape(storage.chunks or ())}"
        if not storage.is_seekable:
            found.append(
                f"{name} is compressed as a whole ({storage.compression}): a rank that wants a box "
                "of it must inflate what comes before"
            )
        elif storage.chunks and spec.is_cut and chunk > LARGE_NBYTES:
            found.append(f"{shown}, {shown_nbytes(chunk)} each: any box decodes all of one")
        elif storage.chunks and chunk < SMALL_NBYTES and nbytes > MANY_READS * chunk:
            found.append(
                f"{shown}, {shown_nbytes(chunk)} each: a sample takes about "
                f"{math.ceil(nbytes / chunk)} small reads"
            )
    if reads and _is_amplified(reads.worst.cost):
        found.append(_amplified(reads))
    return found


def _is_amplified(cost: ReadCost) -> bool:
    return cost.amplification > MAX_AMPLIFICATION and cost.touched_nbytes > FREE_NBYTES


def _amplified(reads: MeshReads) -> str:
    worst = reads.worst
    return (
        f"on the mesh {reads.grid.describe()}, rank {worst.rank} must read or decode "
        f"{shown_nbytes(worst.cost.touched_nbytes)} to get {shown_nbytes(worst.cost.wanted_nbytes)}"
        f" ({worst.cost.amplification:.1f} times as much)"
    )
