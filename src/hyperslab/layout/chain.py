"""Tiles of a chain of layers: which indices a tile needs of every tensor on its way.

Neighbouring tiles both compute what they both need, so tiles are cut where that is least. Those of
one operator, where nothing is computed twice, are cut by ``hyperslab.kernels.tiles``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from hyperslab.layout.box import Box, Span
from hyperslab.layout.cuts import cut_evenly
from hyperslab.layout.exchange import Exchange, plan_exchange
from hyperslab.layout.layout import Grid, Layout
from hyperslab.layout.piece_call import plan_piece_call
from hyperslab.layout.window import TransposedWindow, Window

AnyWindow = Window | TransposedWindow


class Step(NamedTuple):
    """A tensor of the chain, made of earlier ones."""

    shape: tuple[int, ...]
    parents: tuple[int, ...] = ()
    """The numbers of those it is made of: none for the chain's input."""
    windows: tuple[AnyWindow | None, ...] = ()
    """How it reads them along each dim; None, or none at all: index by index."""


@dataclass(frozen=True)
class Route:
    """All tensors of a chain, the first of them its input, under a layout that its output has.

    Dim 1, the channels, is never cut: every tensor is needed with all of them.
    """

    steps: tuple[Step, ...]
    last: int
    """The number of the output's step."""
    output: Layout

    def needs(self, outputs: Box) -> list[Box | None]:
        """What of each tensor ``outputs``, which are not empty, are made of; None: nothing."""
        spans = [self._spans(dim, span) for dim, span in enumerate(outputs.spans)]
        return [_box_of(by_dim) for by_dim in zip(*spans, strict=True)]

    def _spans(self, dim: int, outputs: Span) -> list[Span | None]:
        found: list[Span | None] = [None] * len(self.steps)
        found[self.last] = outputs
        for number in range(self.last, 0, -1):
            span = found[number]
            if span is not None:
                step = self.steps[number]
                for parent in step.parents:
                    reads = _reads(step, self.steps[parent], dim, span)
                    found[parent] = _hull(found[parent], reads)
        return found


def _reads(step: Step, parent: Step, dim: int, outputs: Span) -> Span:
    """The indices of ``parent`` that the indices ``outputs`` of ``step`` are made of."""
    extent = parent.shape[dim]
    window = step.windows[dim] if step.windows else None
    if dim == 1 or (extent == 1 and window is None):  # one index is broadcast over all
        return Span(0, extent)
    if window is None:
        return outputs
    if isinstance(window, Window):
        return plan_piece_call(window, outputs, extent).reads
    reads = window.reads(outputs)
    start = min(max(0, reads.start), extent - 1)  # outputs beyond the last input's get nothing
    return Span(start, max(start + 1, min(reads.stop, extent)))


def _hull(a: Span | None, b: Span) -> Span:
    return b if a is None else Span(min(a.start, b.start), max(a.stop, b.stop))


def _box_of(spans: Sequence[Span | None]) -> Box | None:
    known = [span for span in spans if span is not None]
    return Box(tuple(known)) if len(known) == len(spans) else None


class TileBoxes(NamedTuple):
    """Outputs of the chain that are computed at a time."""

    reads: Box
    """What they need of the chain's input."""
    outputs: Box


@dataclass(frozen=True)
class ChainPlan:
    """One rank's part of a chain."""

    exchange: Exchange
    """It brings what the rank's outputs need of the chain's input."""
    outputs: Box
    """Those that the rank owns."""
    tiles: tuple[TileBoxes, ...]


@lru_cache(maxsize=256)
def plan_chain(grid: Grid, rank: int, source: Layout, route: Route, limit: int) -> ChainPlan:
    """How ``rank`` computes its outputs in tiles whose largest tensor has some ``limit`` elements.

    ``source`` is the layout of the chain's input.
    """
    wanted = [_wanted(route, route.output.box(coords)) for coords in grid.coords]
    outputs = route.output.box(grid.coords[rank])
    tiles = tuple(
        TileBoxes(_wanted(route, tile), tile) for tile in cut_tiles(route, outputs, limit)
    )
    return ChainPlan(plan_exchange(grid, rank, source, wanted), outputs, tiles)


def _wanted(route: Route, outputs: Box) -> Box:
    needs = route.needs(outputs)[0] if outputs else None
    return needs or Box.of(*[(0, 0)] * len(outputs.spans))


MORE_WORK = 1.05
"""How much more may be computed to cut an earlier dim, whose tiles are longer runs of memory."""


def cut_tiles(route: Route, outputs: Box, limit: int) -> Iterator[Box]:
    """Boxes that cover ``outputs``, small enough that no tensor of a tile is beyond ``limit``."""
    if outputs:
        nums = _count_tiles(route, outputs, limit)
        parts = [_pieces(span, num) for span, num in zip(outputs.spans, nums, strict=True)]
        yield from map(Box, product(*parts))


def _count_tiles(route: Route, outputs: Box, limit: int) -> list[int]:
    """Into how many pieces each dim is cut.

    Dims are halved one after the other. Neighbouring tiles both compute what they both need, so the
    dim to halve is that which makes least of it, or an earlier one that is about as good. Then each
    is cut into no more pieces than it must be.
    """
    nums = [1] * len(outputs.spans)
    while _largest(route, outputs, nums) > limit:
        halved = {
            dim: [*nums[:dim], min(2 * nums[dim], span.size), *nums[dim + 1 :]]
            for dim, span in enumerate(outputs.spans)
            if dim != 1 and nums[dim] < span.size
        }
        if not halved:
            break
        work = {dim: _work(route, outputs, each) for dim, each in halved.items()}
        nums = next(halved[dim] for dim in work if work[dim] <= MORE_WORK * min(work.values()))
    for dim in reversed(range(len(nums))):
        while nums[dim] > 1 and _largest(route, outputs, _one_less(nums, dim)) <= limit:
            nums = _one_less(nums, dim)
    return nums


def _one_less(nums: Sequence[int], dim: int) -> list[int]:
    return [*nums[:dim], nums[dim] - 1, *nums[dim + 1 :]]


def _pieces(span: Span, num: int) -> list[Span]:
    return [
        Span(span.start + piece.start, span.start + piece.stop)
        for piece in cut_evenly(span.size, num).spans
    ]


def _numels(route: Route, outputs: Box, nums: Sequence[int]) -> list[int]:
    """The sizes of all tensors of the largest tile: in the middle, with neighbours on all sides."""
    middle = Box(tuple(map(_middle, outputs.spans, nums)))
    return [box.numel for box in route.needs(middle) if box is not None]


def _middle(span: Span, num: int) -> Span:
    size = -(-span.size // num)
    start = span.start + (span.size - size) // 2
    return Span(start, start + size)


def _largest(route: Route, outputs: Box, nums: Sequence[int]) -> int:
    return max(_numels(route, outputs, nums))


def _work(route: Route, outputs: Box, nums: Sequence[int]) -> int:
    return math.prod(nums) * sum(_numels(route, outputs, nums))
