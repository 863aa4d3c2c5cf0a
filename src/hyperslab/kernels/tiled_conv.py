"""Convolutions tile by tile, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import tiles, torch_conv
from hyperslab.kernels.tiles import (
    Axis,
    Each,
    Sliding,
    Step,
    Tile,
    Whole,
    fill,
    outermost_first,
    own_of,
    pick_tiles,
    reads_of,
)
from hyperslab.layout import Span, TransposedWindow, Window


@dataclass(frozen=True, slots=True)
class Adding:
    """A dim along which each of ``num_inputs`` adds to a window of the ``extent`` outputs."""

    window: Window
    num_inputs: int
    extent: int

    def step(self, own: Span) -> Step:
        reads = self._reads(own)
        writes, (pad, end) = self._transposed.writes(reads), self.pads(own)
        return Step(own, reads, writes.size - 2 * pad + end, own.start - writes.start - pad)

    def pads(self, own: Span) -> tuple[int, int]:
        """The padding and the output padding of the call that makes ``own``.

        Padding cuts off both ends of the output alike: as much as neither end needs.
        """
        writes = self._transposed.writes(self._reads(own))
        pad = max(0, min(own.start - writes.start, writes.stop - own.stop))
        if own.size == self.extent:
            pad = self.window.padding
        return pad, max(0, own.stop - writes.stop + pad)

    def _reads(self, own: Span) -> Span:
        """Some inputs, even if ``own`` are outputs that none adds to."""
        if own.size == self.extent:
            return Span(0, self.num_inputs)
        first, stop = self._transposed.reads(own)
        first = min(max(0, first), self.num_inputs - 1)
        return Span(first, max(first + 1, min(stop, self.num_inputs)))

    @property
    def _transposed(self) -> TransposedWindow:
        w = self.window
        return TransposedWindow(w.kernel, w.stride, w.padding, w.dilation)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A dim along which each of ``extent`` outputs meets a window of the inputs, padded to fit."""

    window: Window
    num_inputs: int
    extent: int

    def step(self, own: Span) -> Step:
        reads = Span(0, self.num_inputs) if self.pads(own) else self.window.reads(own)
        return Step(own, reads, own.size)

    def pads(self, own: Span) -> int:
        """What the call pads: it pads both ends alike, as only a call for all outputs may."""
        makes_all = own.size == self.window.output_extent(self.num_inputs)
        return self.window.padding if makes_all else 0


class Conv(NamedTuple):
    """A convolution from ``x`` to ``y``."""

    windows: tuple[Window, ...]
    groups: int

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]
    ) -> Tensor:
        """``y``, which has ``sizes`` along its spatial dims."""
        spatial = [Sliding(*along) for along in zip(self.windows, x.shape[2:], sizes, strict=True)]

        def call(tile: Tile) -> Tensor:
            padding = [axis.pads(s.own) for axis, s in zip(spatial, tile[2:], strict=True)]
            return self._run(x[reads_of(tile)], weight, bias, padding)

        return fill(_pick(x, weight.shape[0], spatial), call)

    def input_grad(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]
    ) -> Tensor:
        """The gradient of ``x``, which has ``sizes``, if that of the output is ``y``.

        With ``bias``, that is what a transposed convolution makes of ``y``.
        """
        spatial = [Adding(*along) for along in zip(self.windows, y.shape[2:], sizes, strict=True)]

        def call(tile: Tile) -> Tensor:
            steps = zip(spatial, tile[2:], strict=True)
            padding, ends = zip(*(axis.pads(s.own) for axis, s in steps), strict=True)
            return self._run(y[reads_of(tile)], weight, bias, padding, ends)

        return fill(_pick(y, weight.shape[1] * self.groups, spatial), call)

    def weight_grad(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the weight, if that of the output is ``y``; added in float32 at least."""
        sizes = zip(self.windows, x.shape[2:], y.shape[2:], strict=True)
        spatial = [Pairing(*along) for along in sizes]
        total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for tile in _pick(x, y.shape[1], spatial):
            padding = [axis.pads(s.own) for axis, s in zip(spatial, tile[2:], strict=True)]
            total += self._run_weight_grad(_padded(x, tile), y[own_of(tile)], weight, padding)
        return total.to(weight.dtype)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Sequence[int],
        transposed_ends: Sequence[int] | None = None,
    ) -> Tensor:
        """One call; with ``transposed_ends``, its output padding, of a transposed convolution."""
        stride, dilation = [w.stride for w in self.windows], [w.dilation for w in self.windows]
        ends = transposed_ends or [0] * len(padding)
        transposed = transposed_ends is not None
        return torch_conv.convolution(
            x, weight, bias, stride, padding, dilation, transposed, ends, self.groups
        )

    def _run_weight_grad(
        self, x: Tensor, y: Tensor, weight: Tensor, padding: Sequence[int]
    ) -> Tensor:
        stride, dilation = [w.stride for w in self.windows], [w.dilation for w in self.windows]
        _, grad, _ = torch_conv.convolution_backward(
            y, x, weight, None, stride, padding, dilation, False, [0] * len(padding), self.groups,
            (False, True, False),
        )  # fmt: skip
        assert grad is not None
        return grad


def _pick(x: Tensor, num_filters: int, spatial: Sequence[Axis]) -> tuple[Tile, ...]:
    axes = (Each(x.shape[0]), Whole(x.shape[1], num_filters), *spatial)
    return pick_tiles(axes, outermost_first(x, without=[1]), tiles.TILE_NUMEL)


def _padded(x: Tensor, tile: Tile) -> Tensor:
    """The inputs of ``tile``, with zeros for those outside ``x``."""
    inside = [step.reads & Span(0, n) for step, n in zip(tile, x.shape, strict=True)]
    if not all(own.size for own in inside):
        return x.new_zeros([step.reads.size for step in tile])
    pads = [
        (own.start - step.reads.start, step.reads.stop - own.stop)
        for own, step in zip(inside, tile, strict=True)
    ]
    part = x[tuple(slice(*own) for own in inside)]
    return F.pad(part, [n for pad in reversed(pads) for n in pad]) if any(map(any, pads)) else part
