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
from hyperslab.layout import Exchange, HaloPlan


class HaloConv(Function):
    """Posts the halo messages, convolves the interior, waits, convolves the strips.

    Backward: the gradients of strips come first and those of received inputs leave; while they
    travel, those of the own piece and of the weight are computed. The convolution is linear in its
    input, so the interior call's gradient counts all but received inputs, and strips that hold only
    those add the rest.
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
        strips = faces.assemble(x, received, plan.strip_inputs)
        for strip, inputs in zip(plan.strips, strips, strict=True):
            out[strip.output] = settings.run(inputs, weight, bias, plan.strip_padding)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            exchange, padding = ctx.plan.exchange, ctx.plan.strip_padding
            return (*differentiable_grads(ctx, grad, exchange, padding), None, None, None)
        plan, settings, mesh = ctx.plan, ctx.settings, ctx.mesh
        x, weight, *received = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        strip_grads = _strip_grads(plan, settings, grad, x, weight, received, wants[:2])
        pending = None
        if wants[0]:
            returns = halo_grads(plan, [grads[0] for grads in strip_grads])
            pending = post_return(returns, plan.exchange, x.dtype, mesh)
        call_grad = grad if plan.interior.exact else _call_grad(plan, settings, grad, x, weight)
        grad_x, grad_weight, grad_bias = settings.run_backward(
            call_grad, x, weight, plan.interior.padding, wants=wants
        )
        if grad_weight is not None:
            for _, more in strip_grads:
                grad_weight += more
        if pending and grad_x is not None:
            add_returned(grad_x, pending.wait(), plan.exchange)
        return grad_x, grad_weight, grad_bias, None, None, None


def differentiable_grads(
    ctx: Any, grad: Tensor, exchange: Exchange, padding: tuple[int, ...]
) -> list[Tensor | None]:
    """The gradients of input, weight and bias with a graph of their own: nothing is hidden.

    Input and weight are the first tensors that ``ctx`` has saved.
    """
    x, weight = (t.view_as(t) for t in ctx.saved_tensors[:2])  # of this use only: x may need weight
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    window = fetch(x, exchange, ctx.mesh)
    out = ctx.settings.run(window, weight, None, padding)
    wanted = [t for t, wants in ((x, wants_x), (weight, wants_weight)) if wants]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True) if wanted else ())
    grads = [next(found) if wants else None for wants in (wants_x, wants_weight)]
    return [*grads, grad.sum((0, *range(2, grad.ndim))) if wants_bias else None]


def _strip_grads(
    plan: HaloPlan,
    settings: Settings,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    received: Sequence[Tensor],
    wants: tuple[bool, bool],
) -> list[tuple[Any, Any]]:
    """The gradients of each strip's inputs, and of the weight by those that were received."""
    if not any(wants):
        return []
    inputs = faces.assemble(x, received, plan.strip_halos)
    return [
        settings.run_backward(
            grad[strip.output], strip_inputs, weight, plan.strip_padding, wants=(*wants, False)
        )[:2]
        for strip, strip_inputs in zip(plan.strips, inputs, strict=True)
    ]


def halo_grads(plan: HaloPlan, strip_grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the received boxes, from those of what each strip reads."""
    if plan.single_readers is not None:
        return [strip_grads[strip][to] for _, _, strip, to in plan.single_readers]
    return faces.received_grads(strip_grads, plan.strip_halos)


def _call_grad(
    plan: HaloPlan, settings: Settings, grad: Tensor, x: Tensor, weight: Tensor
) -> Tensor:
    """``grad`` with zeros for the outputs of the interior call that are not the rank's."""
    shape = settings.output_shape(x, weight, plan.interior.padding)
    whole = grad.new_zeros(shape)
    whole[plan.interior.output] = grad
    return whole
