"""Zero mean and unit variance over elements that several ranks hold."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import gather_stacked, reduce_sum, reduce_sum_
from hyperslab.kernels.batch_norm import merged_moments, moments_over
from hyperslab.kernels.chunks import map_chunks, sum_chunks


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
