"""Zero mean and unit variance over elements that several ranks hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import gather_stacked, reduce_sum_


class Moments(NamedTuple):
    """Which elements share a mean and a variance."""

    dims: tuple[int, ...]
    """The dims of the local piece over which they run."""
    axes: tuple[str, ...]
    """The axes whose ranks hold more of them."""
    num: int
    """How many there are, over all these ranks."""


def standardize(
    x: Tensor, moments: Moments, eps: float, mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps)``, the mean, and the biased variance.

    Collective over ``moments.axes``. Differentiable in its first output; pieces may be uneven and
    empty. Statistics of short floats are kept in float32.
    """
    out: tuple[Tensor, Tensor, Tensor]
    out = _Standardize.apply(x, moments, eps, mesh)  # type: ignore[no-untyped-call]
    return out


class _Standardize(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Moments, eps: float, mesh: Mesh
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _global_moments(x, moments, mesh)
        scale = torch.rsqrt(var + eps)
        out = ((x - mean) * scale).to(x.dtype)
        ctx.save_for_backward(out, scale)
        ctx.moments, ctx.mesh = moments, mesh
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        out, scale = ctx.saved_tensors
        dims = ctx.moments.dims
        wide = scale.dtype
        sums = torch.stack(
            [
                grad.sum(dims, keepdim=True, dtype=wide),
                (grad * out).sum(dims, keepdim=True, dtype=wide),
            ]
        )
        means = reduce_sum_(sums, ctx.mesh, ctx.moments.axes) / ctx.moments.num
        return ((grad - means[0] - out * means[1]) * scale).to(grad.dtype), None, None, None


def _global_moments(x: Tensor, moments: Moments, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks, from each rank's own, in one exchange.

    Squares are taken around each rank's mean, then moved to the global mean: a sum of plain squares
    would cancel.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    count = 1
    for dim in moments.dims:
        count *= x.shape[dim]
    mean = wide.sum(moments.dims, keepdim=True) / max(count, 1)
    squares = (wide - mean).square_().sum(moments.dims, keepdim=True)
    if not moments.axes:
        return mean, squares / moments.num
    counts = torch.full_like(mean, count)
    counts, means, squares = gather_stacked(
        torch.stack([counts, mean, squares]), mesh, moments.axes
    ).unbind(1)
    mean = (counts * means).sum(0) / moments.num
    squares = (squares + counts * (means - mean).square()).sum(0)
    return mean, squares / moments.num
