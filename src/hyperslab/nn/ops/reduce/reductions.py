"""Sums, means, variances and other reductions over any dims of the global tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.reduce import gather_stacked, reduce_sum
from hyperslab.layout import Layout, integers
from hyperslab.nn.op import define
from hyperslab.nn.slab import Slab

Dims = int | Sequence[int] | None

SHORT = (torch.float16, torch.bfloat16)
"""Dtypes that are put together over ranks in float32."""


def widened(x: Tensor) -> Tensor:
    """``x``, or a copy in float32 if it is of a short dtype."""
    return x.float() if x.dtype in SHORT else x


def normalize_dims(x: Slab, dim: Dims) -> tuple[int, ...]:
    """``dim`` as sorted non-negative dims; None or an empty list are all dims."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    dims = integers(dim)
    reach = max(x.ndim, 1)  # a number has a dim 0 to torch
    for one in dims:
        if not -reach <= one < reach:
            raise IndexError(f"dim {one} is out of range for a tensor of {x.ndim} dims")
    if len({one % reach for one in dims}) < len(dims):
        raise RuntimeError(f"a dim appears more than once in {dims}")
    return tuple(sorted(one % x.ndim for one in dims)) if x.ndim else ()


def reduced_layout(layout: Layout, dims: Sequence[int], *, keepdim: bool) -> Layout:
    """The layout of a tensor reduced over ``dims``."""
    if keepdim:
        shape = tuple(1 if dim in dims else n for dim, n in enumerate(layout.shape))
        return Layout(shape, layout.whole_along(dims).splits)
    kept = [dim for dim in range(len(layout.shape)) if dim not in dims]
    return Layout(
        tuple(layout.shape[dim] for dim in kept), tuple(layout.splits[dim] for dim in kept)
    )


def without_dims(x: Slab, value: Tensor, dims: Sequence[int], *, keepdim: bool) -> Slab | Tensor:
    """``value``, this rank's part of ``x`` reduced over ``dims``: a Slab, or plain if 0-d."""
    if not value.ndim:
        return value
    return x.with_local(value, reduced_layout(x.layout, dims, keepdim=keepdim))


def reduced(x: Slab, local: Tensor, dims: Sequence[int], *, keepdim: bool) -> Slab | Tensor:
    """``local`` summed over the ranks that split ``dims``: a Slab, or a plain tensor if 0-d."""
    total = reduce_sum(local, x.mesh, x.layout.axes_of(dims))
    return without_dims(x, total, dims, keepdim=keepdim)


def num_reduced(x: Slab, dims: Sequence[int]) -> int:
    """How many elements of the global tensor each result is made of."""
    return math.prod(x.layout.shape[dim] for dim in dims)


@define("reducing", torch.sum, Tensor.sum)
def total(
    x: Slab, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Slab | Tensor:
    """The sum over ``dim`` of the global tensor."""
    dims = normalize_dims(x, dim)
    if x.layout.axes_of(dims) and (dtype or x.dtype) in SHORT:
        local = torch.sum(x.local, dims, keepdim, dtype=torch.float32)
        return reduced(x, local, dims, keepdim=keepdim).to(dtype or x.dtype)
    return reduced(x, torch.sum(x.local, dims, keepdim, dtype=dtype), dims, keepdim=keepdim)


@define("reducing", torch.mean, Tensor.mean)
def mean(
    x: Slab, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Slab | Tensor:
    """The mean over ``dim`` of the global tensor: each element counts once, however it is cut."""
    dims = normalize_dims(x, dim)
    if not x.layout.axes_of(dims):
        local = torch.mean(x.local, dims, keepdim, dtype=dtype)
        return reduced(x, local, dims, keepdim=keepdim)
    out_dtype = dtype or x.dtype
    if not out_dtype.is_floating_point and not out_dtype.is_complex:
        raise RuntimeError(
            f"mean of a {x.dtype} tensor needs dtype=, a floating point or complex type"
        )
    summed: Any = total(x, dims, keepdim, dtype=torch.float32 if out_dtype in SHORT else dtype)
    return (summed / num_reduced(x, dims)).to(out_dtype)  # type: ignore[no-any-return]


@define("reducing", torch.nansum, Tensor.nansum)
def nansum(
    x: Slab, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Slab | Tensor:
    """The sum over ``dim`` of what is a number in the global tensor."""
    numbers = x.local.masked_fill(x.local.isnan(), 0)
    return total(x.with_local(numbers), dim, keepdim, dtype=dtype)


@define("reducing", torch.nanmean, Tensor.nanmean)
def nanmean(
    x: Slab, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Slab | Tensor:
    """The mean over ``dim`` of what is a number in the global tensor."""
    out_dtype = dtype or x.dtype
    if not out_dtype.is_floating_point:
        raise TypeError(f"nanmean wants a floating point type, got {out_dtype}")
    wide = torch.float32 if out_dtype in SHORT else out_dtype
    summed: Any = nansum(x, dim, keepdim, dtype=wide)
    numbers = total(x.with_local(~x.local.isnan()), dim, keepdim)
    return (summed / numbers).to(out_dtype)  # type: ignore[no-any-return]


@define("reducing", torch.count_nonzero, Tensor.count_nonzero)
def count_nonzero(x: Slab, dim: Dims = None) -> Slab | Tensor:
    """How many elements of the global tensor are not zero along ``dim``."""
    return total(x.with_local(x.local != 0), dim)


@define("reducing", Tensor.sum_to_size)
def sum_to_size(self: Slab, *size: Any) -> Slab | Tensor:
    """The sum over the dims that broadcasting from ``size`` would have made or stretched."""
    sizes = integers(size[0] if len(size) == 1 else size)
    in_front = self.ndim - len(sizes)
    pairs = enumerate(zip(sizes, self.layout.shape[in_front:], strict=True), in_front)
    stretched = [dim for dim, (size, extent) in pairs if size != extent]
    if any(sizes[dim - in_front] != 1 for dim in stretched):
        raise RuntimeError(f"{tuple(self.shape)} is not what a shape of {sizes} broadcasts to")
    x = total(self, stretched, keepdim=True) if stretched else self
    return total(x, list(range(in_front))) if in_front and isinstance(x, Slab) else x


def _make_truth(name: str) -> None:
    function = getattr(torch, name)
    one_decides = name == "any"  # that is true, or for ``all`` one that is false

    @define("reducing", function, getattr(Tensor, name))
    def truth(x: Slab, dim: Dims = None, keepdim: bool = False) -> Slab | Tensor:
        # Unlike other reductions, these take an empty list at its word.
        dims = () if isinstance(dim, Sequence) and not dim else normalize_dims(x, dim)
        local = function(x.local) if dim is None else function(x.local, dims, keepdim)
        if x.layout.axes_of(dims):
            deciding = ((local != 0) == one_decides).to(torch.int32)
            decided = reduce_sum(deciding, x.mesh, x.layout.axes_of(dims)) > 0
            local = (decided == one_decides).to(local.dtype)
        return without_dims(x, local, dims, keepdim=keepdim)


@define("reducing", torch.prod, Tensor.prod)
def product(
    x: Slab, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Slab | Tensor:
    """The product over ``dim`` of the global tensor."""
    dims = normalize_dims(x, dim)
    axes = x.layout.axes_of(dims)
    out_dtype = dtype or x.dtype
    wide = torch.float32 if axes and out_dtype in SHORT else dtype
    if dim is None:
        local = torch.prod(x.local, dtype=wide)
    else:
        local = torch.prod(x.local, dim, keepdim, dtype=wide)
    if axes:
        local = gather_stacked(local, x.mesh, axes).prod(0)
        local = local.to(out_dtype) if out_dtype in SHORT else local
    return without_dims(x, local, dims, keepdim=keepdim)


@define("reducing", torch.allclose, Tensor.allclose)
def allclose(
    x: Slab | Tensor,
    other: Slab | Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """Whether all elements of the global tensors are close. Collective over the mesh."""
    close: Any = torch.isclose(x, other, rtol, atol, equal_nan)  # type: ignore[arg-type]
    return bool(close.all())


@define("reducing", torch.equal, Tensor.equal)
def equal(x: Slab | Tensor, other: Slab | Tensor) -> bool:
    """Whether the global tensors have one shape and the same elements. Collective over the mesh."""
    if tuple(x.shape) != tuple(other.shape):
        return False
    same: Any = torch.eq(x, other)  # type: ignore[arg-type]
    return bool(same.all())


for _name in ("any", "all"):
    _make_truth(_name)


def _make_moments(name: str) -> None:
    """``var``, ``std``, or one of them with the mean."""
    function = getattr(torch, name)

    @define("reducing", function, *([getattr(Tensor, name)] if hasattr(Tensor, name) else []))
    def moments(
        x: Slab,
        dim: Dims = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        if correction is None:
            correction = 0 if unbiased is False else 1
        dims = normalize_dims(x, dim)
        none_here = x.numel() and not x.local.numel()  # torch would warn of too few elements
        if x.layout.axes_of(dims) or none_here:
            out_dtype = torch.var(x.local.new_ones(2)).dtype  # refuses integers
            var, mean = _spread(x, dims, correction)
            spread = (_root(var) if name.startswith("std") else var).to(out_dtype)
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
