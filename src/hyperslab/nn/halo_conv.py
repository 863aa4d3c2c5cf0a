"""A convolution whose halo exchange is hidden behind its interior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.fetch import add_returned, fetch, post_fetch, post_return
from hyperslab.comm.mesh import Mesh
from hyperslab.kernels import faces
from hyperslab.kernels.conv import Settings
from hyperslab.layout import HaloPlan, Strip

MIN_INTERIOR_NUMEL = 1 << 16
"""Smaller pieces are better convolved in one call after the exchange: more calls cost more."""


class HaloConv(Function):
    """Posts the halo messages, convolves the interior, waits, convolves the strips.

    Backward: the gradients of received inputs leave first; while they travel, the gradients of the
    own piece and of the weight are computed. The convolution is linear in its input, so the
    interior call's gradient counts all but received inputs, and strips that hold only those add
    the rest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: HaloPlan,
        settings: Settings,
        mesh: Mesh,
    ) -> Tensor:
        ctx.plan, ctx.settings, ctx.mesh = plan, settings, mesh
        pending = post_fetch(x, plan.exchange, mesh)
        out = settings.run(x, weight, bias, plan.interior.padding)
        if not plan.interior.exact:
            out = out[plan.interior.output].data  # no view: those cannot be written into
        received = pending.wait()
        ctx.save_for_backward(x, weight, *received)
        strips = _strip_inputs(plan.strips, x, received)
        faces.copy_views_(
            [inputs[strip.own.target] for strip, inputs in zip(plan.strips, strips, strict=True)],
            [x[strip.own.source] for strip in plan.strips],
        )
        for strip, inputs in zip(plan.strips, strips, strict=True):
            out[strip.output] = settings.run(inputs, weight, bias, plan.strip_padding)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (*_differentiable_grads(ctx, grad), None, None, None)
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
            strips = _strip_inputs(plan.strips, x, received)
            for strip, inputs in zip(plan.strips, strips, strict=True):
                grad_weight += settings.run_backward(
                    grad[strip.output],
                    inputs,
                    weight,
                    plan.strip_padding,
                    wants=(False, True, False),
                )[1]
        if pending and grad_x is not None:
            add_returned(grad_x, pending.wait(), plan.exchange)
        return grad_x, grad_weight, grad_bias, None, None, None


def _differentiable_grads(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients of input, weight and bias with a graph of their own: nothing is hidden."""
    x, weight, *_ = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    window = fetch(x, ctx.plan.exchange, ctx.mesh)
    out = ctx.settings.run(window, weight, None, ctx.plan.strip_padding)
    wanted = [t for t, wants in ((x, wants_x), (weight, wants_weight)) if wants]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True) if wanted else ())
    grads = [next(found) if wants else None for wants in (wants_x, wants_weight)]
    return [*grads, grad.sum((0, *range(2, grad.ndim))) if wants_bias else None]


def _strip_inputs(
    strips: Sequence[Strip], like: Tensor, received: Sequence[Tensor]
) -> list[Tensor]:
    """The received inputs of each strip, zero elsewhere."""
    found = faces.zeros_alike([strip.shape for strip in strips], like)
    parts = [(i, number, part) for i, strip in enumerate(strips) for number, part in strip.halo]
    faces.copy_views_(
        [found[i][part.target] for i, _, part in parts],
        [received[number][part.source] for _, number, part in parts],
    )
    return found


def _halo_grads(
    plan: HaloPlan,
    settings: Settings,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    received: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of the received boxes."""
    grads = faces.zeros_for([box.shape for box in received], x.dtype, x.device)
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
            grads[number][part.source].add_(strip_grad[part.target])
    return grads


def _call_grad(
    plan: HaloPlan, settings: Settings, grad: Tensor, x: Tensor, weight: Tensor
) -> Tensor:
    """``grad`` with zeros for the outputs of the interior call that are not the rank's."""
    shape = settings.output_shape(x, weight, plan.interior.padding)
    whole = grad.new_zeros(shape)
    whole[plan.interior.output] = grad
    return whole
