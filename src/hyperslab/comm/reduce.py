"""Sums and stacks over ranks, and their adjoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.failure_report import contact
from hyperslab.comm.graph import TensorSpec, as_operator, recompute_first, save_marker
from hyperslab.comm.mesh import Mesh
from hyperslab.torch_private import is_traced

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that gloo or NCCL do not know, and those in which they are summed and sent instead."""


def reduce_sum(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """The sum of ``x`` over the ranks along ``axes``, equal on all of them.

    Collective over ``axes``. Differentiable: the gradient is summed over the same ranks, because
    each rank's sum feeds a loss of its own.
    """
    axes = tuple(axis for axis in axes if mesh.grid.size(axis) > 1)
    return _Sum.apply(x, mesh, axes) if axes else x  # type: ignore[no-untyped-call]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        save_marker(ctx, x)
        return reduce_sum_(x.clone(memory_format=torch.contiguous_format), mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        return reduce_sum(grad, ctx.mesh, ctx.axes), None, None


def reduce_sum_(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Sums the contiguous ``x`` in place over the ranks along ``axes``; not differentiable."""
    axes = [axis for axis in axes if mesh.grid.size(axis) > 1]
    if not axes:
        return x
    if is_traced():
        spec = TensorSpec(x.shape, x.dtype, x.device)
        return as_operator(lambda xs: [reduce_sum_(xs[0].clone(), mesh, axes)], [x], [spec])[0]
    total = x.to(_WIDER.get(x.dtype, x.dtype))
    with contact(f"summing over {'/'.join(axes)}", mesh):
        dist.all_reduce(total, group=mesh.group_over(axes))
    return x if total is x else x.copy_(total)


def gather_stacked(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """The tensors ``x`` of all ranks along ``axes``, stacked in the order of the ranks.

    Collective over ``axes``; all must bring the same shape. Differentiable: what all ranks' losses
    say of a rank's entry is summed and goes to that rank.
    """
    axes = tuple(axis for axis in axes if mesh.grid.size(axis) > 1)
    return _Stack.apply(x, mesh, axes) if axes else x.unsqueeze(0)  # type: ignore[no-untyped-call]


class _Stack(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        save_marker(ctx, x)
        return _stacked(x, mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        place = ctx.mesh.group_over(ctx.axes).rank()
        return reduce_sum(grad, ctx.mesh, ctx.axes)[place], None, None


def _stacked(x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    group = mesh.group_over(axes)
    if is_traced():
        spec = TensorSpec((group.size(), *x.shape), x.dtype, x.device)
        return as_operator(lambda xs: [_stacked(xs[0], mesh, axes)], [x], [spec])[0]
    with contact(f"gathering over {'/'.join(axes)}", mesh):
        mine = x.to(_WIDER.get(x.dtype, x.dtype)).contiguous()
        out = mine.new_empty((group.size(), *x.shape))
        dist.all_gather(list(out), mine, group=group)
    return out.to(x.dtype)
