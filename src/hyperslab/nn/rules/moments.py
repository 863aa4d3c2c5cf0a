"""Variances and standard deviations over any dims of the global tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.reduce import reduce_sum
from hyperslab.nn.registry import numpy_names, register
from hyperslab.nn.rules.reduction import (
    Dims,
    normalize_dims,
    num_reduced,
    refuse_out,
    widened,
    without_dims,
)
from hyperslab.nn.slab import Slab


def _make_moments(name: str) -> None:
    """``var``, ``std``, or one of them with the mean."""
    function = getattr(torch, name)

    @register(function, *([getattr(Tensor, name)] if hasattr(Tensor, name) else []))
    @numpy_names
    def moments(
        input: Slab,
        dim: Dims = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        out: Tensor | Slab | None = None,
    ) -> Any:
        x = input
        refuse_out(function, x, out)
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        if correction is None:
            correction = 0 if unbiased is False else 1
        dims = normalize_dims(x, dim)
        none_here = x.numel() and not x.local.numel()  # torch would warn of too few elements
        if x.layout.axes_of(dims) or none_here:
            kind = torch.var(x.local.new_ones(2)).dtype  # refuses integers
            var, mean = _spread(x, dims, correction)
            spread = (_root(var) if name.startswith("std") else var).to(kind)
            found: tuple[Tensor, ...] = (spread,)
            if name.endswith("mean"):
                found = (spread, mean.to(x.dtype))
            if not keepdim:
                found = tuple(value.squeeze(dims) for value in found)
        else:
            local = function(x.local, dims, correction=correction, keepdim=keepdim)
            found = local if isinstance(local, tuple) else (local,)
        slabs = tuple(without_dims(x, value, dims, keepdim=keepdim) for value in found)
        return slabs if name.endswith("mean") else slabs[0]


def _spread(x: Slab, dims: tuple[int, ...], correction: float) -> tuple[Tensor, Tensor]:
    """Variance and mean, with the reduced dims kept.

    Squares are taken around the global mean: a sum of plain squares would cancel.
    """
    axes, num = x.layout.axes_of(dims), num_reduced(x, dims)
    wide = widened(x.local)
    mean = reduce_sum(wide.sum(dims, keepdim=True), x.mesh, axes) / num
    apart = wide - mean
    squares = apart.real.square() + apart.imag.square() if x.is_complex() else apart.square()
    summed = reduce_sum(squares.sum(dims, keepdim=True), x.mesh, axes)
    return summed / max(num - correction, 0), mean


def _root(var: Tensor) -> Tensor:
    """The square root, whose gradient is 0 at 0."""
    return torch.where(var == 0, var.detach(), var).sqrt() if var.requires_grad else var.sqrt()


for _name in ("var", "std", "var_mean", "std_mean"):
    _make_moments(_name)
