"""Sums and means over any dims of the global tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.reduce import reduce_sum
from hyperslab.layout import Layout
from hyperslab.nn.registry import integers, numpy_names, register, unsupported
from hyperslab.nn.slab import Slab

_SHORT = (torch.float16, torch.bfloat16)  # summed over ranks in float32


def normalize_dims(x: Slab, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """``dim`` as sorted non-negative dims; None or an empty list are all dims."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    dims = integers(dim)
    for one in dims:
        if not -x.ndim <= one < x.ndim:
            raise IndexError(f"dim {one} is out of range for a tensor of {x.ndim} dims")
    return tuple(sorted(one % x.ndim for one in dims))


def reduced_layout(layout: Layout, dims: Sequence[int], *, keepdim: bool) -> Layout:
    """The layout of a tensor reduced over ``dims``."""
    if keepdim:
        shape = tuple(1 if dim in dims else n for dim, n in enumerate(layout.shape))
        return Layout(shape, layout.whole_along(dims).splits)
    kept = [dim for dim in range(len(layout.shape)) if dim not in dims]
    return Layout(
        tuple(layout.shape[dim] for dim in kept), tuple(layout.splits[dim] for dim in kept)
    )


def reduced(x: Slab, local: Tensor, dims: Sequence[int], *, keepdim: bool) -> Slab | Tensor:
    """``local`` summed over the ranks that split ``dims``: a Slab, or a plain tensor if 0-d."""
    total = reduce_sum(local, x.mesh, x.layout.axes_of(dims))
    if not total.ndim:
        return total
    return x.with_local(total, reduced_layout(x.layout, dims, keepdim=keepdim))


@register(torch.sum, Tensor.sum)
@numpy_names
def total(
    input: Slab,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | Slab | None = None,
) -> Slab | Tensor:
    """The sum over ``dim`` of the global tensor."""
    x = input
    _refuse_out(torch.sum, x, out)
    dims = normalize_dims(x, dim)
    if x.layout.axes_of(dims) and dtype is None and x.dtype in _SHORT:
        wide = reduced(
            x, torch.sum(x.local, dims, keepdim, dtype=torch.float32), dims, keepdim=keepdim
        )
        return wide.to(x.dtype)
    return reduced(x, torch.sum(x.local, dims, keepdim, dtype=dtype), dims, keepdim=keepdim)


@register(torch.mean, Tensor.mean)
@numpy_names
def mean(
    input: Slab,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | Slab | None = None,
) -> Slab | Tensor:
    """The mean over ``dim`` of the global tensor: each element counts once, however it is cut."""
    x = input
    _refuse_out(torch.mean, x, out)
    dims = normalize_dims(x, dim)
    if not x.layout.axes_of(dims):
        local = torch.mean(x.local, dims, keepdim, dtype=dtype)
        return reduced(x, local, dims, keepdim=keepdim)
    if not (dtype or x.dtype).is_floating_point and not (dtype or x.dtype).is_complex:
        raise TypeError(
            f"mean of a {x.dtype} tensor needs dtype=, a floating point or complex type"
        )
    count = math.prod(x.layout.shape[dim] for dim in dims)
    wide = torch.float32 if dtype is None and x.dtype in _SHORT else dtype
    summed: Any = total(x, dims, keepdim, dtype=wide)
    return (summed / count).to(dtype or x.dtype)  # type: ignore[no-any-return]


def _refuse_out(function: Any, x: Slab, out: Tensor | Slab | None) -> None:
    if out is not None:
        raise unsupported(function, x, "out= is not supported")


def _make_adaptive_avg_pool(num_dims: int) -> None:
    function = getattr(F, f"adaptive_avg_pool{num_dims}d")

    @register(function, getattr(torch, f"adaptive_avg_pool{num_dims}d", function))
    def adaptive_avg_pool(input: Slab, output_size: int | Sequence[int | None]) -> Slab | Tensor:
        """The average pool to one output along split dims, which is the mean over them."""
        x = input
        dims = range(x.ndim - num_dims, x.ndim)
        sizes = [output_size] * num_dims if isinstance(output_size, int | None) else output_size
        split = [dim for dim in dims if dim in x.layout.split_dims]
        if any(sizes[dim - dims.start] != 1 for dim in split):
            raise unsupported(
                function, x, f"its output size {tuple(sizes)} is not 1 along a split dim"
            )
        if split:
            x = cast(Slab, mean(x, split, keepdim=True))
        local = function(x.local, output_size)
        layout = x.layout
        for dim in dims:
            layout = layout.with_dim(dim, local.shape[dim])
        return x.with_local(local, layout)


for _num_dims in (1, 2, 3):
    _make_adaptive_avg_pool(_num_dims)
