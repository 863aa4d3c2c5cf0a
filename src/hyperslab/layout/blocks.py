"""Products by a matrix of which every rank keeps a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hyperslab.layout.cuts import cut_evenly, cut_in_chunks
from hyperslab.layout.exchange import Exchange, plan_exchange
from hyperslab.layout.layout import Grid, Layout, Split


@dataclass(frozen=True)
class BlockPlan:
    """How one rank takes part."""

    input: Layout
    """In which the input meets the blocks."""
    output: Layout
    axis: str | None
    """The axis over which what ranks made is to be added; None where columns are whole."""
    exchange: Exchange | None
    """Whose adjoint adds it where it belongs; None where each rank is to have all of the sum."""


@lru_cache(maxsize=4096)
def plan_blocks(grid: Grid, rank: int, source: Layout, weight: Layout) -> BlockPlan:
    """For ``source @ weight.T``, where ``weight`` has rows and columns and stays where it is."""
    rows, columns = weight.splits
    last = len(source.shape) - 1
    busy = weight.axes
    free = [None if split and split.axis in busy else split for split in source.splits]
    needed = Layout(source.shape, (*free[:last], columns))
    made = Layout((*source.shape[:last], weight.shape[0]), (*free[:last], rows))
    if columns is None:
        return BlockPlan(needed, made, None, None)
    home = _home(grid, source, made, columns.axis)
    if home == made:
        return BlockPlan(needed, made, columns.axis, None)
    boxes = [made.box(coords) for coords in grid.coords]
    return BlockPlan(needed, home, columns.axis, plan_exchange(grid, rank, home, boxes))


def _home(grid: Grid, source: Layout, made: Layout, axis: str) -> Layout:
    """Where the outputs belong that ranks along ``axis`` made together."""
    last = len(source.shape) - 1
    for dim, split in enumerate(source.splits[:last]):
        if split and split.axis == axis:
            return made.with_dim(dim, made.shape[dim], split)
    if made.splits[last] is None:
        extent = made.shape[last]
        return made.with_dim(last, extent, Split(axis, cut_in_chunks(extent, grid.size(axis))))
    if last and made.splits[0] is None:
        num_samples = made.shape[0]
        return made.with_dim(0, num_samples, Split(axis, cut_evenly(num_samples, grid.size(axis))))
    return made
