"""Losses over the whole global batch and volume, equal on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.reduce import reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout
from hyperslab.nn.align import check_operands, localize
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab, check_one_grid


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction asked for, by the old arguments if they are given."""
    if size_average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a reduction: use 'none', 'mean' or 'sum'")
    return reduction


@register(F.mse_loss)
def mse_loss(
    input: Slab | Tensor,
    target: Slab | Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Slab | Tensor | None = None,
) -> Slab | Tensor:
    """The squared error, over all elements of the global tensors."""
    reduction = _reduction(size_average, reduce, reduction)
    if input.shape != target.shape:
        warnings.warn(
            f"mse_loss of an input of shape {tuple(input.shape)} and a target of shape "
            f"{tuple(target.shape)} broadcasts them, which is seldom meant: give them one shape",
            stacklevel=4,
        )
    x: Any = _as_autocast_sums(input)
    errors = (x - _as_autocast_sums(target)).square()
    if weight is not None:
        if tuple(weight.shape) != tuple(errors.shape):
            raise LayoutError(
                f"weight of shape {tuple(weight.shape)} for errors of shape {tuple(errors.shape)}"
            )
        errors = errors * weight
        if reduction == "mean":
            return errors.sum() / weight.sum()  # type: ignore[no-any-return]
    if reduction == "none":
        return errors  # type: ignore[no-any-return]
    return errors.sum() if reduction == "sum" else errors.mean()  # type: ignore[no-any-return]


def _as_autocast_sums(t: Slab | Tensor) -> Slab | Tensor:
    """``t`` in float32 where autocast is on, which runs losses in it."""
    short = t.dtype in (torch.float16, torch.bfloat16)
    return t.float() if short and torch.is_autocast_enabled(t.device.type) else t


@register(F.cross_entropy)
def cross_entropy(
    input: Slab | Tensor,
    target: Slab | Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Slab | Tensor:
    """The cross entropy over all samples and positions; classes lie along dim 1, which is whole."""
    reduction = _reduction(size_average, reduce, reduction)
    if not isinstance(input, Slab) and isinstance(target, Slab):
        input = target.with_local(input, Layout.unsplit(input.shape))
    x = check_operands(F.cross_entropy, input, weight)
    if x.ndim < 2 or x.layout.splits[1]:
        raise unsupported(F.cross_entropy, x, "its classes must lie along dim 1 and be whole")
    soft = tuple(target.shape) == tuple(x.shape)
    positions = _without_classes(x.layout)
    if not soft and tuple(target.shape) != positions.shape:
        raise LayoutError(
            f"targets of shape {tuple(target.shape)} for scores of shape {tuple(x.shape)}"
        )
    if isinstance(target, Slab):
        check_one_grid((x.mesh.grid, target.mesh.grid))
    layout = x.layout if soft else positions
    labels = localize(target, layout, layout.box(x.mesh.coords))
    losses = F.cross_entropy(
        x.local, labels, weight, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    if reduction == "none":
        return x.with_local(losses, positions)
    total = reduce_sum(losses.sum(), x.mesh, x.layout.axes)
    if reduction == "sum":
        return total
    if soft:
        return total / (x.numel() // x.shape[1])
    counted = labels != ignore_index
    ones = counted.to(losses.dtype) if weight is None else weight[labels * counted] * counted
    return total / reduce_sum(ones.sum(), x.mesh, x.layout.axes)


def _without_classes(layout: Layout) -> Layout:
    return Layout((layout.shape[0], *layout.shape[2:]), (layout.splits[0], *layout.splits[2:]))
