"""An activation and a pool whose halo exchange is hidden behind their interior.

What travels is activated, and the gradients that come home are those of activated numbers. Ranks
that activate in a pass of its own, and then fetch, send and expect the same: whether to fuse is
each rank's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hyperslab.comm.fetch import add_returned, post_pieces, post_return
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.messages import plain_memory
from hyperslab.dist_ops.halo_conv import halo_grads
from hyperslab.kernels import act_pool, faces
from hyperslab.kernels.act_pool import Call, activate, activation_grad
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.layout import Box, HaloPlan, Span, Strip, Window

Where = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How one rank pools a piece that has an interior."""

    halo: HaloPlan
    interior: Pool
    """Of the whole piece, with padding in place of what others hold."""
    output: Where
    """Where the rank's outputs lie in those of the interior call."""
    exact: bool
    """Whether the interior call makes these and no others."""
    strips: tuple[Pool, ...]
    """Of what strips read."""
    fill: float
    """What strips read outside the tensor."""

    @property
    def is_sum(self) -> bool:
        """Whether the interior call's gradient is right for all own numbers, as in a sum."""
        return self.interior.mode == "avg"


def plan_pool(
    halo: HaloPlan,
    windows: Sequence[Window],
    outputs: Box,
    make: Callable[[Sequence[int]], Pool],
    pads: Callable[[Box], Sequence[int]],
    fill: float,
) -> PoolPlan:
    """How a rank pools its piece, which has an interior.

    ``make(padding)`` is the pool with that padding, ``pads(outputs)`` the padding of a call that
    computes ``outputs``.
    """
    owned = halo.exchange.owned
    dims = zip(windows, owned.spans[2:], outputs.spans[2:], strict=True)
    padding, extra, places = zip(*[_interior(*dim) for dim in dims], strict=True)
    interior = make(padding)._replace(extra=extra)
    return PoolPlan(
        halo,
        interior,
        (slice(None), slice(None), *places),
        interior.output_shape(owned.shape) == outputs.shape,
        tuple([make(pads(_outputs(strip, outputs))) for strip in halo.strips]),
        fill,
    )


def _interior(window: Window, own: Span, out: Span) -> tuple[int, int, slice]:
    """Padding before both ends of a call on ``own``, more at its end, and where ``out`` lies."""
    pad, before = own.start + window.padding - out.start * window.stride, 0
    while pad < 0:  # the call's first output is one before
        pad, before = pad + window.stride, before + 1
    place = slice(before, before + out.size)
    reads = (place.stop - 1) * window.stride + window.kernel
    return pad, max(0, reads - own.size - 2 * pad), place


def _outputs(strip: Strip, among: Box) -> Box:
    """The outputs of a strip, in global coordinates."""
    places = zip(among.spans[2:], strip.output[2:], strict=True)
    spans = [Span(span.start + at.start, span.start + at.stop) for span, at in places]
    return Box((*among.spans[:2], *spans))


def halo_pool(y: Tensor, slope: float, plan: PoolPlan, mesh: Mesh) -> Tensor:
    """The rank's part of the pool of the activated tensor of which ``y`` is this rank's piece.

    Collective over ``mesh``: its messages, forward and backward, are those of a fetch of the
    activated tensor by ``plan.halo.exchange``. Differentiable once.
    """
    keeps = torch.is_grad_enabled() and y.requires_grad
    out: Tensor = _HaloPool.apply(y, slope, plan, mesh, keeps)  # type: ignore[no-untyped-call]
    return out


class _HaloPool(Function):
    """Posts the halo messages, pools the interior, waits, pools the strips.

    Backward: the gradients of received numbers leave first; while they travel, the interior's are
    computed.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, slope: float, plan: PoolPlan, mesh: Mesh, keeps: bool
    ) -> Tensor:
        exchange = plan.halo.exchange
        sent = [activate(face, slope) for face in faces.pack(y, exchange.sent)]
        pending = post_pieces(sent, exchange, y.dtype, mesh)
        call = act_pool.Call.on(y, slope, plan.interior)
        out, kept = call.run(y, keeps=keeps)
        if not plan.exact:
            out = out[plan.output].data  # no view: those cannot be written into
        windows = _windows(plan, y, slope, pending.wait())
        calls, kept_of_strips = _pool_strips(plan, windows, out, keeps=keeps)
        if keeps:
            ctx.plan, ctx.mesh, ctx.call, ctx.calls = plan, mesh, call, calls
            activated = [] if slope == 1 else sent if plan.is_sum else sent + windows
            ctx.save_for_backward(kept, *kept_of_strips, *activated)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, halo, slope = ctx.plan, ctx.plan.halo, ctx.call.slope
        grad = plain_memory(grad)
        num_strips, num_sent = len(halo.strips), len(halo.exchange.sends)
        kept, *others = ctx.saved_tensors
        kept_of_strips, activated = others[:num_strips], others[num_strips:]
        window_grads = _window_grads(plan, ctx.calls, grad, kept_of_strips)
        leaving = halo_grads(halo, window_grads)
        pending = post_return(leaving, halo.exchange, grad.dtype, ctx.mesh)
        home: Tensor = ctx.call.run_backward(_interior_grad(plan, grad, ctx.call), kept)
        returned = _unactivated(pending.wait(), activated[:num_sent], slope)
        add_returned(home, returned, halo.exchange)
        if not plan.is_sum:
            own_grads = _unactivated(window_grads, activated[num_sent:], slope)
            for strip, found in zip(halo.strips, own_grads, strict=True):
                home[strip.own.source] += found[strip.own.target]
        return home, None, None, None, None


def _windows(plan: PoolPlan, y: Tensor, slope: float, received: Sequence[Tensor]) -> list[Tensor]:
    """What the strips read, activated as what was received is."""
    windows = faces.assemble(y, received, plan.halo.strip_inputs, fill=plan.fill)
    for strip, window in zip(plan.halo.strips, windows, strict=True):
        activate(window[strip.own.target], slope, in_place=True)
    return windows


def _pool_strips(
    plan: PoolPlan, windows: Sequence[Tensor], out: Tensor, *, keeps: bool
) -> tuple[list[Call], list[Tensor | None]]:
    """Writes the outputs of strips into ``out``; how they were made, and what that keeps."""
    calls, kept = [], []
    for strip, window, pool in zip(plan.halo.strips, windows, plan.strips, strict=True):
        calls.append(act_pool.Call.on(window, 1.0, pool))
        part, kept_of_strip = calls[-1].run(window, keeps=keeps)
        kept.append(kept_of_strip)
        border = out[strip.output]
        border.copy_(part[_first(border)])
    return calls, kept


def _window_grads(
    plan: PoolPlan, calls: Sequence[Call], grad: Tensor, kept: Sequence[Tensor | None]
) -> list[Tensor]:
    """The gradients of what the strips read."""
    strips = zip(plan.halo.strips, calls, kept, strict=True)
    return [call.run_backward(_placed(grad[strip.output], call), k) for strip, call, k in strips]


def _unactivated(
    grads: Sequence[Tensor], activated: Sequence[Tensor], slope: float
) -> Sequence[Tensor]:
    """The gradients of numbers before their activation."""
    if slope == 1:
        return grads
    return [activation_grad(*pair, slope) for pair in zip(grads, activated, strict=True)]


def _interior_grad(plan: PoolPlan, grad: Tensor, call: Call) -> Tensor:
    """``grad`` for the outputs of the interior call, zero for those that are not used."""
    if not plan.is_sum and plan.halo.strips:
        grad = grad.clone()
        for strip in plan.halo.strips:
            grad[strip.output] = 0
    return _placed(grad, call, plan.output)


def _placed(grad: Tensor, call: Call, where: Where | None = None) -> Tensor:
    """``grad`` for those of a call's outputs in ``where``, or the first, and zeros for others."""
    shape = call.pool.output_shape(call.shape)
    if grad.shape == shape:
        return grad
    whole = grad.new_zeros(shape)
    whole[where or _first(grad)] = grad
    return whole


def _first(x: Tensor) -> Where:
    """Slices of the first ``x.shape`` elements along each dim."""
    return tuple(map(slice, x.shape))
