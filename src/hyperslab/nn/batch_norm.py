"""Batch norm of pieces of a tensor: one pass for the statistics, one for the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import reduce_sum_
from hyperslab.kernels.batch_norm import (
    gradient_sums,
    in_memory_of,
    input_gradient,
    mean_and_variance,
    normalize,
)
from hyperslab.nn.standardize import Moments, moments_over_ranks, standardize

Ends = tuple[Tensor | None, Tensor | None]
"""The weight and the bias, or their gradients."""


def normalize_channels(
    x: Tensor, ends: Ends, moments: Moments, eps: float, mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * weight + bias``, the mean, and the biased variance.

    ``moments`` are over all dims but the channels, which are whole. Collective over
    ``moments.axes``. Differentiable in its first output, twice too; pieces may be uneven and empty.
    Every piece may lie in memory as it likes.
    """
    out: tuple[Tensor, Tensor, Tensor]
    out = _Normalize.apply(x, *ends, moments, eps, mesh)  # type: ignore[no-untyped-call]
    return out


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        mesh: Mesh,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = moments_over_ranks(*mean_and_variance(x), x, moments, mesh)
        scale = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.moments, ctx.eps, ctx.mesh = moments, eps, mesh
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return normalize(x, mean, scale, weight, bias), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        if torch.is_grad_enabled():
            return *_differentiable_backward(ctx, grad, x, weight), None, None, None
        grad = in_memory_of(x, grad)
        sums = gradient_sums(grad, x, mean, scale)
        home = None
        if ctx.needs_input_grad[0]:
            means = reduce_sum_(torch.stack(sums), ctx.mesh, ctx.moments.axes)
            means.div_(ctx.moments.num)
            home = input_gradient(grad, x, mean, scale, weight, means)
        return home, *_end_gradients(ctx, weight, *sums, scale), None, None, None


def _end_gradients(
    ctx: Any, weight: Tensor | None, of_bias: Tensor, distances: Tensor, scale: Tensor
) -> Ends:
    _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    return (
        (distances * scale).to(weight.dtype) if weight is not None and wants_weight else None,
        of_bias.to(ctx.bias_dtype) if wants_bias else None,
    )


def _differentiable_backward(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients, by functions that have gradients themselves."""
    moments: Moments = ctx.moments
    x, weight = x.view_as(x), None if weight is None else weight.view_as(weight)  # of this use only
    out = standardize(x, moments, ctx.eps, ctx.mesh, inner=weight is not None)[0]
    if weight is not None:
        out = out * weight.to(x.dtype).view(-1, *[1] * (x.ndim - 2))
    ends: list[Tensor] = [x] if weight is None else [x, weight]
    wants = ctx.needs_input_grad[:2]
    wanted = [end for end, wants_it in zip(ends, wants, strict=False) if wants_it]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True) if wanted else ())
    return (
        *(next(found) if wants_it else None for wants_it in wants),
        grad.sum(moments.dims).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
    )
