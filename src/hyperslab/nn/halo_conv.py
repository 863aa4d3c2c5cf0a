"""A convolution whose halo exchange is hidden behind its interior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hyperslab.comm.fetch import add_returned, empty_like_format, post_fetch, post_return
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import (
    Box,
    Exchange,
    Grid,
    Layout,
    Span,
    Window,
    output_box_reads,
    plan_windows,
)

Slices = tuple[slice, ...]

MIN_INTERIOR_NUMEL = 1 << 16
"""Smaller pieces are better convolved in one call after the exchange: more calls would cost more."""


class Part(NamedTuple):
    """Where a box lies in what it comes from and in what it goes to."""

    source: Slices
    target: Slices


@dataclass(frozen=True, slots=True)
class Strip:
    """Outputs that need received inputs, and what their inputs are made of."""

    output: Slices
    """Where the outputs lie in the rank's output."""
    shape: tuple[int, ...]
    """Of the inputs, padding along split dims included."""
    own: Part
    """The inputs that are the rank's own."""
    halo: tuple[tuple[int, Part], ...]
    """Those that were received, with the number of the message."""


@dataclass(frozen=True, slots=True)
class Interior:
    """One call on the rank's own piece, as it lies in memory, that computes all outputs.

    The call pads with zeros what other ranks hold, so outputs that read there are wrong until strips
    overwrite them. It pads both ends alike, which may make outputs that are not the rank's; ``output``
    says where its own are.
    """

    padding: tuple[int, ...]
    output: Slices
    exact: bool
    """Whether the call makes the rank's outputs and no others."""


@dataclass(frozen=True, slots=True)
class HaloConvPlan:
    """How one rank convolves a piece that has an interior."""

    exchange: Exchange
    interior: Interior
    strips: tuple[Strip, ...]
    strip_padding: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan_halo_conv(
    grid: Grid, rank: int, source: Layout, windows: tuple[Window, ...]
) -> HaloConvPlan | None:
    """The plan for a convolution with ``windows`` along the spatial dims, which follow dim 1.

    None where the piece has no interior, so that there is nothing to hide messages behind.
    """
    everything = (None, None, *windows)
    windowed = plan_windows(grid, rank, source, everything)
    exchange, outputs = windowed.exchange, windowed.box
    inner = _interior_outputs(source, windows, exchange.owned, outputs)
    if not inner:
        return None
    split = [source.splits[2 + dim] is not None for dim in range(len(windows))]
    return HaloConvPlan(
        exchange,
        _plan_interior(windows, split, exchange.owned, outputs),
        tuple(
            _plan_strip(source, everything, exchange, outputs, border)
            for border in outputs.minus(inner)
        ),
        strip_padding(source, windows),
    )


def strip_padding(source: Layout, windows: Sequence[Window]) -> tuple[int, ...]:
    """What the local call pads once padding along split dims has been fetched."""
    splits = source.splits[2:]
    return tuple(0 if cut else w.padding for cut, w in zip(splits, windows, strict=True))


def _interior_outputs(
    source: Layout, windows: Sequence[Window], owned: Box, outputs: Box
) -> Box:
    """The outputs that read nothing but the rank's own inputs and padding."""
    spans = list(outputs.spans)
    for dim, window in enumerate(windows, start=2):
        own, span = owned.spans[dim], spans[dim]
        first = -((-own.start - window.padding) // window.stride)
        stop = (own.stop - 1 + window.padding - window.reach) // window.stride + 1
        spans[dim] = span & Span(
            span.start if own.start == 0 else first,
            span.stop if own.stop == source.shape[dim] else stop,
        )
    return Box(tuple(spans)) if owned else Box.of(*[(0, 0)] * len(spans))


def _plan_interior(
    windows: Sequence[Window], split: Sequence[bool], owned: Box, outputs: Box
) -> Interior:
    padding, where, exact = [], [slice(None), slice(None)], True
    for dim, window in enumerate(windows, start=2):
        if not split[dim - 2]:
            padding.append(window.padding)
            where.append(slice(None))
            continue
        own, out = owned.spans[dim], outputs.spans[dim]
        # The call's first output is out.start where its padding is this; each stride more of padding
        # puts one output before it, until padding is not negative and the last output is reached.
        pad, before = own.start + window.padding - out.start * window.stride, 0
        while pad < 0 or _num_outputs(window, own.size + 2 * pad) < before + out.size:
            pad, before = pad + window.stride, before + 1
        exact &= _num_outputs(window, own.size + 2 * pad) == out.size
        padding.append(pad)
        where.append(slice(before, before + out.size))
    return Interior(tuple(padding), tuple(where), exact)


def _num_outputs(window: Window, num_inputs: int) -> int:
    return (num_inputs - window.reach - 1) // window.stride + 1


def _plan_strip(
    source: Layout,
    windows: tuple[Window | None, ...],
    exchange: Exchange,
    outputs: Box,
    border: Box,
) -> Strip:
    reads = output_box_reads(source, windows, border)
    own = exchange.owned & reads
    halo = tuple(
        (number, Part(part.slices_in(message.box), part.slices_in(reads)))
        for number, message in enumerate(exchange.receives)
        if (part := message.box & reads)
    )
    where = (slice(None), slice(None), *border.slices_in(outputs)[2:])
    kept = Part(own.slices_in(exchange.owned), own.slices_in(reads))
    return Strip(where, reads.shape, kept, halo)


class Settings(NamedTuple):
    """What a convolution needs besides tensors and padding."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]) -> Tensor:
        zeros = (0,) * len(padding)
        return torch.convolution(
            x, weight, bias, self.stride, padding, self.dilation, False, zeros, self.groups
        )

    def run_backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, ...],
        *,
        wants: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, weight and bias, as far as they are wanted."""
        zeros = (0,) * len(padding)
        return torch.ops.aten.convolution_backward.default(  # type: ignore[no-any-return]
            grad, x, weight, [weight.shape[0]], self.stride, padding, self.dilation, False, zeros,
            self.groups, wants,
        )  # fmt: skip


class HaloConv(Function):
    """Posts the halo messages, convolves the interior, waits, convolves the strips.

    Backward: the gradients of received inputs leave first; while they travel, the gradients of the
    own piece and of the weight are computed. The convolution is linear in its input, so the interior
    call's gradient counts everything but received inputs, and strips that hold only those add the rest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: HaloConvPlan,
        settings: Settings,
        mesh: Mesh,
    ) -> Tensor:
        ctx.plan, ctx.settings, ctx.mesh = plan, settings, mesh
        pending = post_fetch(x, plan.exchange, mesh)
        out = settings.run(x, weight, bias, plan.interior.padding)
        if not plan.interior.exact:
            out = out[plan.interior.output]
        received = pending.wait()
        ctx.save_for_backward(x, weight, *received)
        for strip in plan.strips:
            inputs = _strip_inputs(strip, x, received)
            inputs[strip.own.target] = x[strip.own.source]
            out[strip.output] = settings.run(inputs, weight, bias, plan.strip_padding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, settings, mesh = ctx.plan, ctx.settings, ctx.mesh
        x, weight, *received = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        pending = None
        if wants_x:
            returns = _halo_grads(plan, settings, grad, x, weight, received)
            pending = post_return(returns, plan.exchange, x.dtype, mesh)
        call_grad = grad if plan.interior.exact else _call_grad(plan, settings, grad, x, weight)
        grad_x, grad_weight, grad_bias = settings.run_backward(
            call_grad, x, weight, plan.interior.padding, wants=(wants_x, wants_weight, wants_bias)
        )
        if grad_weight is not None:
            for strip in plan.strips:
                inputs = _strip_inputs(strip, x, received)
                grad_weight += settings.run_backward(
                    grad[strip.output], inputs, weight, plan.strip_padding, wants=(False, True, False)
                )[1]
        if pending and grad_x is not None:
            add_returned(grad_x, pending.wait(), plan.exchange)
        return grad_x, grad_weight, grad_bias, None, None, None


def _strip_inputs(strip: Strip, like: Tensor, received: Sequence[Tensor]) -> Tensor:
    """The received inputs of ``strip``, zero elsewhere."""
    inputs = empty_like_format(strip.shape, like).zero_()
    for number, part in strip.halo:
        inputs[part.target] = received[number][part.source]
    return inputs


def _halo_grads(
    plan: HaloConvPlan,
    settings: Settings,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    received: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of the received boxes."""
    grads = [torch.zeros_like(box) for box in received]
    for strip in plan.strips:
        strip_grad = settings.run_backward(
            grad[strip.output],
            x.new_empty(strip.shape),
            weight,
            plan.strip_padding,
            wants=(True, False, False),
        )[0]
        assert strip_grad is not None
        for number, part in strip.halo:
            grads[number][part.source] += strip_grad[part.target]
    return grads


def _call_grad(
    plan: HaloConvPlan, settings: Settings, grad: Tensor, x: Tensor, weight: Tensor
) -> Tensor:
    """``grad`` with zeros for the outputs of the interior call that are not the rank's."""
    pads = zip(x.shape[2:], plan.interior.padding, weight.shape[2:], settings.stride, settings.dilation)
    sizes = [(n + 2 * pad - step * (k - 1) - 1) // jump + 1 for n, pad, k, jump, step in pads]
    whole = grad.new_zeros((*grad.shape[:2], *sizes))
    whole[plan.interior.output] = grad
    return whole
