"""A convolution and the pool after it on pieces, with one exchange for both.

A rank fetches what its pooled outputs read of the convolution's input, through both windows. The
convolution's outputs that windows of two ranks hold are computed by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hyperslab.layout.box import Box, Span
from hyperslab.layout.exchange import Exchange, output_box_reads, plan_exchange, plan_windows
from hyperslab.layout.halo import local_padding
from hyperslab.layout.layout import Grid, Layout
from hyperslab.layout.window import Window


@dataclass(frozen=True)
class ConvPoolPlan:
    """How one rank convolves and pools."""

    exchange: Exchange
    """It brings the convolution's inputs, zeros outside the tensor among them."""
    padding: tuple[int, ...]
    """What the local convolution pads."""
    before: tuple[int, ...]
    """What the local pool pads at the start of each spatial dim."""
    after: tuple[int, ...]
    output: Layout
    """Of the pool."""
    box: Box
    """The pooled outputs that the rank owns."""
    overlap: float
    """How many of the convolution's outputs are computed by several ranks, as a part of all."""


@lru_cache(maxsize=1024)
def plan_conv_pool(
    grid: Grid,
    rank: int,
    source: Layout,
    conv: tuple[Window, ...],
    pool: tuple[Window, ...],
    num_filters: int,
) -> ConvPoolPlan | None:
    """The plan for windows along the spatial dims, which follow dim 1.

    None where some rank would have no outputs of either, and where an end of the tensor is padded
    more than the other: ranks do all alike.
    """
    if any(window.extra for window in (*conv, *pool)):
        return None
    middle = plan_windows(grid, rank, source, (None, None, *conv)).output.with_dim(1, num_filters)
    pooled = plan_windows(grid, rank, middle, (None, None, *pool)).output
    if not all(layout.box(at) for layout in (source, middle, pooled) for at in grid.coords):
        return None

    def held(coords: Mapping[str, int]) -> Box:
        """The convolution's outputs that a rank's windows hold."""
        reads = output_box_reads(middle, (None, None, *pool), pooled.box(coords))
        return reads & Box.whole(middle.shape)

    held_by = [held(coords) for coords in grid.coords]
    if not all(held_by):
        return None
    wanted = [
        output_box_reads(source, (None, None, *conv), _inputs(source, box)) for box in held_by
    ]
    mine, outputs = held_by[rank], pooled.box(grid.coords[rank])
    ends = [
        _padding(
            window, outputs.spans[dim], mine.spans[dim], is_split=middle.splits[dim] is not None
        )
        for dim, window in enumerate(pool, start=2)
    ]
    return ConvPoolPlan(
        plan_exchange(grid, rank, source, wanted),
        local_padding(source, conv),
        tuple([start for start, _ in ends]),
        tuple([end for _, end in ends]),
        pooled,
        outputs,
        sum(box.numel for box in held_by) / sum(middle.box(at).numel for at in grid.coords) - 1,
    )


def _inputs(source: Layout, outputs: Box) -> Box:
    """``outputs`` of a convolution with the channels that it reads."""
    return Box((outputs.spans[0], Span(0, source.shape[1]), *outputs.spans[2:]))


def _padding(window: Window, outputs: Span, held: Span, *, is_split: bool) -> tuple[int, int]:
    """How far the windows of ``outputs`` reach beyond what is ``held`` of the tensor."""
    if not is_split:
        return window.padding, window.padding
    reads = window.reads(outputs)
    return held.start - reads.start, reads.stop - held.stop
