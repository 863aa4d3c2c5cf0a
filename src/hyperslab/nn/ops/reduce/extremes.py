"""The largest and smallest elements along any dims of the global tensor, and where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import gather_stacked, reduce_sum
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.reduce.reductions import (
    Dims,
    normalize_dims,
    num_reduced,
    widened,
    without_dims,
)
from hyperslab.nn.slab import Slab


def extreme_of(x: Slab, dims: tuple[int, ...], *, largest: bool) -> Tensor:
    """The largest or smallest elements over split ``dims``, which are kept; NaN if any is.

    Collective over the axes that split them. Not differentiable.
    """
    local = x.local.detach()
    if any(local.shape[dim] == 0 for dim in dims):
        shape = [1 if dim in dims else n for dim, n in enumerate(local.shape)]
        found = local.new_full(shape, _bound(local.dtype, lowest=largest))
    else:
        found = _take(largest)(local, dims, True)
    return _take(largest)(gather_stacked(found, x.mesh, x.layout.axes_of(dims)), 0)


def _take(largest: bool) -> Callable[..., Tensor]:
    return torch.amax if largest else torch.amin


def _bound(dtype: torch.dtype, *, lowest: bool) -> float:
    """What no element of ``dtype`` is below, or above."""
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype == torch.bool:
        return not lowest
    limits = torch.iinfo(dtype)
    return limits.min if lowest else limits.max


class _Extreme(Function):
    """``value``, the gradient of which the elements of ``x`` that equal it share evenly."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        dims: tuple[int, ...],
        mesh: Mesh,
        axes: tuple[str, ...],
        nan_is_one: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.dims, ctx.mesh, ctx.axes, ctx.nan_is_one = dims, mesh, axes, nan_is_one
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, value = ctx.saved_tensors
        equal = x == value
        if ctx.nan_is_one:
            equal |= x.isnan() & value.isnan()
        wide = widened(grad)
        num = reduce_sum(equal.sum(ctx.dims, keepdim=True), ctx.mesh, ctx.axes)
        share = (reduce_sum(wide, ctx.mesh, ctx.axes) / num).to(grad.dtype)
        return equal * share, None, None, None, None, None


def _extreme(
    function: Callable[..., Any], x: Slab, dims: tuple[int, ...], keepdim: bool, *, largest: bool
) -> Slab | Tensor:
    """The extreme over ``dims``; elements that tie share its gradient, wherever they are."""
    axes = x.layout.axes_of(dims)
    if not axes:
        local = _take(largest)(x.local, dims, keepdim)
        return without_dims(x, local, dims, keepdim=keepdim)
    _check_some(function, x, dims)
    value = extreme_of(x, dims, largest=largest)
    nan_is_one = function in _OF_ALL
    value = _Extreme.apply(x.local, value, dims, x.mesh, axes, nan_is_one)  # type: ignore[no-untyped-call]
    return without_dims(x, value if keepdim else value.squeeze(dims), dims, keepdim=keepdim)


def _check_some(function: Callable[..., Any], x: Slab, dims: tuple[int, ...]) -> None:
    if not num_reduced(x, dims):
        raise IndexError(
            f"{function.__name__} of nothing: a tensor of shape {tuple(x.shape)} along dims {dims}"
        )
    if x.is_complex():
        raise TypeError(f"{function.__name__} does not order complex numbers")


def _first_extreme(x: Slab, dims: tuple[int, ...], *, largest: bool) -> Tensor:
    """The index of the first extreme over split ``dims``, which are one dim or all; dims kept.

    It counts along the one dim, or through the flattened tensor. NaN is beyond all numbers.
    """
    local = x.local.detach()
    none = num_reduced(x, dims)
    shape = [1 if dim in dims else n for dim, n in enumerate(local.shape)]
    if any(local.shape[dim] == 0 for dim in dims):
        value = local.new_full(shape, _bound(local.dtype, lowest=largest))
        index = torch.full(shape, none, device=local.device)
    else:
        flat = local.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
        found = flat.max(-1) if largest else flat.min(-1)
        value = found.values.view(shape)
        index = _global_index(x, dims, found.indices.view(shape))
    axes = x.layout.axes_of(dims)
    values, indices = (gather_stacked(t, x.mesh, axes) for t in (value, index))
    best = _take(largest)(values, 0)
    is_best = (values == best) | (values.isnan() & best.isnan())
    return indices.where(is_best, none).amin(0)


def _global_index(x: Slab, dims: tuple[int, ...], index: Tensor) -> Tensor:
    """An index into this rank's flattened ``dims`` as one into those of the global tensor."""
    box, out, step = x.box, torch.zeros_like(index), 1
    for dim in reversed(dims):
        span = box.spans[dim]
        out = out + (index % span.size + span.start) * step
        index = index // span.size
        step *= x.layout.shape[dim]
    return out


def _picked(x: Slab, dim: int, index: Tensor) -> Tensor:
    """The elements of ``x`` at the global ``index`` along the split ``dim``; differentiable."""
    span = x.box.spans[dim]
    local = x.local.byte() if x.dtype == torch.bool else x.local
    if span.size:
        mine = (index >= span.start) & (index < span.stop)
        here = local.gather(dim, (index - span.start).clamp(0, span.size - 1))
        here = here.where(mine, torch.zeros((), dtype=here.dtype, device=here.device))
    else:
        here = local.sum(dim, keepdim=True, dtype=local.dtype)
    return reduce_sum(here, x.mesh, x.layout.axes_of([dim])).to(x.dtype)


def _along_dim(
    function: Callable[..., Any], x: Slab, dim: int, keepdim: bool, *, largest: bool
) -> Any:
    """Values and indices along one dim; the gradient goes to the element that was chosen."""
    if not x.ndim:
        raise unsupported(function, x)  # run on the whole
    dims = normalize_dims(x, dim)
    if x.layout.axes_of(dims):
        _check_some(function, x, dims)
        indices = _first_extreme(x, dims, largest=largest)
        found = [_picked(x, dims[0], indices), indices]
        found = found if keepdim else [value.squeeze(dims) for value in found]
    else:
        found = list(function(x.local, dim, keepdim))
    make: Any = torch.return_types.max if largest else torch.return_types.min
    return make(without_dims(x, value, dims, keepdim=keepdim) for value in found)


def _make_extreme(name: str, *, largest: bool) -> None:
    of_dims, of_one, of_index = f"a{name}", name, f"arg{name}"
    along, overall, where = (getattr(torch, each) for each in (of_dims, of_one, of_index))
    pair = torch.maximum if largest else torch.minimum

    @define("reducing", along, getattr(Tensor, of_dims))
    def of_many(x: Slab, dim: Dims = None, keepdim: bool = False) -> Slab | Tensor:
        return _extreme(along, x, normalize_dims(x, dim), keepdim, largest=largest)

    @define("reducing", overall, getattr(Tensor, of_one))
    def of_all_or_one(
        x: Slab | Tensor,
        dim: int | Slab | Tensor | None = None,
        keepdim: bool = False,
        *,
        other: Slab | Tensor | None = None,
    ) -> Any:
        other = dim if isinstance(dim, Slab | Tensor) else other
        if other is not None:
            return dispatch(pair, (x, other), {})
        assert isinstance(x, Slab)
        assert not isinstance(dim, Slab | Tensor)
        if dim is None:
            return _extreme(overall, x, normalize_dims(x, None), False, largest=largest)
        return _along_dim(overall, x, dim, keepdim, largest=largest)

    @define("reducing", where, getattr(Tensor, of_index))
    def index_of(x: Slab, dim: int | None = None, keepdim: bool = False) -> Slab | Tensor:
        dims = normalize_dims(x, dim)
        if not x.layout.axes_of(dims):
            return without_dims(x, where(x.local, dim, keepdim), dims, keepdim=keepdim)
        if x.dtype == torch.bool:
            raise TypeError(f"{of_index} does not take bools")
        _check_some(where, x, dims)
        index = _first_extreme(x, dims, largest=largest)
        return without_dims(x, index if keepdim else index.squeeze(dims), dims, keepdim=keepdim)


@define("reducing", torch.aminmax, Tensor.aminmax)
def aminmax(x: Slab, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The smallest and the largest elements along ``dim``, or of all."""
    dims = normalize_dims(x, dim)
    ends = (_extreme(torch.aminmax, x, dims, keepdim, largest=largest) for largest in (False, True))
    return torch.return_types.aminmax(ends)  # type: ignore[arg-type]


_OF_ALL = (torch.max, torch.min)
"""Functions of which a NaN shares the gradient as if it equalled itself."""

_make_extreme("max", largest=True)
_make_extreme("min", largest=False)
