"""Normalisation with a mean and a variance over elements that several ranks hold.

``standardize`` serves any set of dims. ``normalize_channels`` is the batch norm: one pass for the
statistics, one for the output, weight and bias included. The passes over a rank's own piece are
those of ``hyperslab.kernels.norm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.graph import cached_constants
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import gather_stacked, reduce_sum, reduce_sum_
from hyperslab.kernels.memory_format import RowsBeside
from hyperslab.kernels.norm import (
    gradient_sums,
    in_memory_of,
    input_gradient,
    map_chunks,
    mean_and_variance,
    merged_moments,
    merged_statistics,
    moments_over,
    normalize,
    sum_chunks,
)


class Moments(NamedTuple):
    """Which elements share a mean and a variance."""

    dims: tuple[int, ...]
    """The dims of the local piece over which they run."""
    axes: tuple[str, ...]
    """The axes whose ranks hold more of them."""
    num: int
    """How many there are, over all these ranks."""


def standardize(
    x: Tensor, moments: Moments, eps: float, mesh: Mesh, *, inner: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps)``, the mean, and the biased variance.

    ``inner`` says that the first output goes no further than the caller, who may not change it in
    place: the backward pass then needs it rather than ``x``, which most callers let go.

    Collective over ``moments.axes``. Differentiable in its first output; pieces may be uneven and
    empty. Statistics of short floats are kept in float32.
    """
    out, mean, var, _ = _Standardize.apply(x, moments, eps, mesh, inner)  # type: ignore[no-untyped-call]
    return out, mean, var


class _Standardize(Function):
    """The scale is an output, so that a gradient of its gradient knows that it depends on ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Moments, eps: float, mesh: Mesh, inner: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var = moments_over_ranks(*moments_over(x, moments.dims), x, moments, mesh)
        scale = torch.rsqrt(var + eps)
        out = map_chunks(_standardized, x, mean, scale)
        ctx.save_for_backward(out if inner else x, mean, scale)
        ctx.moments, ctx.mesh, ctx.inner = moments, mesh, inner
        ctx.mark_non_differentiable(var)
        ctx.set_materialize_grads(False)
        return out, mean, var, scale

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_mean: Tensor | None, _: None, grad_scale: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        saved, mean, scale = ctx.saved_tensors
        out = saved if ctx.inner else map_chunks(_standardized, saved, mean, scale)
        grad = torch.zeros_like(out) if grad is None else grad
        dims, wide = ctx.moments.dims, scale.dtype
        means = _mean_over_ranks(
            [
                grad.sum(dims, keepdim=True, dtype=wide),
                sum_chunks(torch.mul, dims, wide, grad, out),
            ],
            ctx,
        )
        home = map_chunks(_input_grad, grad, out, *means, scale)
        if grad_mean is not None or grad_scale is not None:  # in a gradient of a gradient
            ends = [torch.zeros_like(mean) if g is None else g for g in (grad_mean, grad_scale)]
            means = _mean_over_ranks(ends, ctx)
            home = home + means[0] - means[1] * scale.square() * out
            home = home.to(grad.dtype)
        return home, None, None, None, None


def _standardized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x - mean) * scale


def _input_grad(
    grad: Tensor, out: Tensor, mean: Tensor, mean_with_out: Tensor, scale: Tensor
) -> Tensor:
    return (grad - mean - out * mean_with_out) * scale


def _mean_over_ranks(sums: list[Tensor], ctx: Any) -> Tensor:
    stacked = torch.stack(sums)
    reduce = reduce_sum if torch.is_grad_enabled() else reduce_sum_
    moments: Moments = ctx.moments
    return reduce(stacked, ctx.mesh, moments.axes) / moments.num


def moments_over_ranks(
    mean: Tensor, var: Tensor, x: Tensor, moments: Moments, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks, from those of this rank's ``x``, in one exchange."""
    if not moments.axes:
        return mean, var
    count = math.prod(x.shape[dim] for dim in moments.dims)
    share = torch.full_like(mean, count / max(1, moments.num))
    stacked = gather_stacked(torch.stack([share, mean, var]), mesh, moments.axes)
    return merged_moments(*stacked.unbind(1))


def _statistics(
    x: Tensor, moments: Moments, eps: float, mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and scale of each channel over all ranks, in one exchange."""
    mean, var = mean_and_variance(x)
    if not moments.axes:
        return mean, var, torch.rsqrt(var + eps)
    share = math.prod(x.shape[dim] for dim in moments.dims) / max(1, moments.num)
    mine = torch.stack([_filled(share, mean.numel(), mean.dtype, mean.device), mean, var])
    return merged_statistics(gather_stacked(mine, mesh, moments.axes), eps)


@cached_constants
def _filled(value: float, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((num,), value, dtype=dtype, device=device)


MOST_COUNTED = 2**31 - 1
"""That the kernel of the input gradient can count."""


@cached_constants
def _count(num: int, device: torch.device) -> Tensor:
    return torch.tensor([num], dtype=torch.int32).to(device)


Ends = tuple[Tensor | None, Tensor | None]
"""The weight and the bias, or their gradients."""


def normalize_channels(
    x: Tensor,
    ends: Ends,
    moments: Moments,
    eps: float,
    mesh: Mesh,
    update: Callable[[Tensor, Tensor], None],
    rows: RowsBeside = (0, 0),
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias``.

    ``moments`` are over all dims but the channels, which are whole. Collective over
    ``moments.axes``. Differentiable, twice too; pieces may be uneven and empty. Every piece may
    lie in memory as it likes; ``rows`` of it may be left beside the output.

    ``update`` is given the mean and the biased variance before tensors are saved for the backward
    pass: a checkpoint, which computes again, goes no further than that.
    """
    out: Tensor
    out = _Normalize.apply(x, *ends, moments, eps, mesh, update, rows)  # type: ignore[no-untyped-call]
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
        update: Callable[[Tensor, Tensor], None],
        rows: RowsBeside,
    ) -> Tensor:
        mean, var, scale = _statistics(x, moments, eps, mesh)
        update(mean, var)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.moments, ctx.eps, ctx.mesh = moments, eps, mesh
        ctx.bias_dtype = None if bias is None else bias.dtype
        return normalize(x, mean, scale, weight, bias, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable_backward(ctx, grad, x, weight), *[None] * 5
        grad = in_memory_of(x, grad)
        sums = gradient_sums(grad, x, mean, scale)
        home = None
        if ctx.needs_input_grad[0]:
            total, num = reduce_sum_(torch.stack(sums), ctx.mesh, ctx.moments.axes), ctx.moments.num
            if num > MOST_COUNTED:
                total, num = total.div_(num), 1
            home = input_gradient(grad, x, mean, scale, weight, total, _count(num, x.device))
        return home, *_end_gradients(ctx, weight, *sums, scale), *[None] * 5


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
