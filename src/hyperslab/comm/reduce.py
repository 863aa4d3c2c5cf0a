"""Sums over ranks, and their adjoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.failure import lost_contact
from hyperslab.comm.mesh import Mesh


def reduce_sum(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """The sum of ``x`` over the ranks along ``axes``, equal on all of them.

    Collective over ``axes``. Differentiable: the gradient is summed over the same ranks, because
    each rank's sum feeds a loss of its own.
    """
    axes = tuple(axis for axis in axes if mesh.grid.size(axis) > 1)
    return _Sum.apply(x, mesh, axes) if axes else x  # type: ignore[no-any-return]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        return reduce_sum_(x.clone(memory_format=torch.contiguous_format), mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_sum(grad, ctx.mesh, ctx.axes), None, None


def reduce_sum_(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Sums the contiguous ``x`` in place over the ranks along ``axes``; not differentiable."""
    if axes:
        try:
            dist.all_reduce(x, group=mesh.group_over(axes))
        except RuntimeError as error:
            raise lost_contact(f"summing over {'/'.join(axes)}", mesh, error) from error
    return x


def gather_stacked(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """The tensors ``x`` of all ranks along ``axes``, stacked in the order of the ranks.

    Collective over ``axes``; all must bring the same shape. Not differentiable.
    """
    group = mesh.group_over(axes)
    out = x.new_empty((group.size(), *x.shape))
    try:
        dist.all_gather(list(out), x.contiguous(), group=group)
    except RuntimeError as error:
        raise lost_contact(f"gathering over {'/'.join(axes)}", mesh, error) from error
    return out
