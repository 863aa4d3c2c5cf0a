"""Softmax and its kin, and running sums and products, along any dim of the global tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.reduce import gather_stacked, reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.nn.op import define
from hyperslab.nn.ops.reduce.extremes import extreme_of
from hyperslab.nn.ops.reduce.reductions import SHORT, Dims, normalize_dims, without_dims
from hyperslab.nn.slab import Slab


class _Exponentials(NamedTuple):
    shifted: Tensor
    """This rank's piece less ``shift``."""
    each: Tensor
    """The exponentials of what is shifted."""
    shift: Tensor
    """The largest elements over all ranks, or 0 where these are infinite and should not be."""
    total: Tensor
    """The sums of the exponentials over all ranks."""


def _exponentials(
    x: Slab, dims: tuple[int, ...], dtype: torch.dtype, *, finite: bool = False
) -> _Exponentials:
    """In ``dtype``, or in float32 if that is short."""
    wide = x.with_local(x.local.to(torch.float32 if dtype in SHORT else dtype))
    shift = extreme_of(wide, dims, largest=True)
    shift = shift.masked_fill(shift.isinf(), 0) if finite else shift
    shifted = wide.local - shift
    each = shifted.exp()
    total = reduce_sum(each.sum(dims, keepdim=True), x.mesh, x.layout.axes_of(dims))
    return _Exponentials(shifted, each, shift, total)


def _softmax(e: _Exponentials) -> Tensor:
    return e.each / e.total


def _log_softmax(e: _Exponentials) -> Tensor:
    return e.shifted - e.total.log()


def _make_softmax(name: str, combine: Callable[[_Exponentials], Tensor]) -> None:
    function = getattr(torch, name)

    @define(
        "reducing", function, getattr(Tensor, name), getattr(F, name), getattr(torch.special, name)
    )
    def softmax(
        x: Slab, dim: int | None = None, dtype: torch.dtype | None = None, *, _stacklevel: int = 3
    ) -> Slab:
        [dim] = normalize_dims(x, _implied_dim(x.ndim) if dim is None else dim) or (0,)
        if not x.ndim or not x.layout.splits[dim]:
            return x.with_local(function(x.local, dim, dtype))
        out_dtype = function(x.local.new_zeros(1), 0, dtype).dtype  # autocast's; refuses integers
        return x.with_local(combine(_exponentials(x, (dim,), out_dtype)).to(out_dtype))


def _implied_dim(ndim: int) -> int:
    """The dim that torch's modules take where none is given."""
    return 0 if ndim in (0, 1, 3) else 1


@define("reducing", F.softmin)
def softmin(
    x: Slab, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Slab:
    """The softmax of ``-input``."""
    return F.softmax(-x, dim, dtype=dtype)  # type: ignore[return-value, operator]


@define("reducing", torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(x: Slab, dim: Dims, keepdim: bool = False) -> Slab | Tensor:
    """The logarithm of the sum of exponentials along ``dim``."""
    if isinstance(dim, Sequence) and not dim:
        raise LayoutError("logsumexp wants at least one dim")
    dims = normalize_dims(x, dim)
    if not x.layout.axes_of(dims):
        local = torch.logsumexp(x.local, dims, keepdim)
        return without_dims(x, local, dims, keepdim=keepdim)
    out_dtype = torch.logsumexp(x.local.new_zeros(1), 0).dtype
    e = _exponentials(x, dims, out_dtype, finite=True)
    value = (e.total.log() + e.shift).to(out_dtype)
    return without_dims(x, value if keepdim else value.squeeze(dims), dims, keepdim=keepdim)


_make_softmax("softmax", _softmax)
_make_softmax("log_softmax", _log_softmax)


def _make_cumulative(name: str, of_all: str, join: str) -> None:
    """``name`` along a dim is, on each rank, that of its piece, joined with that before it."""
    function, reduce, combine = (getattr(torch, each) for each in (name, of_all, join))

    @define("reducing", function, getattr(Tensor, name))
    def cumulate(x: Slab, dim: int, *, dtype: torch.dtype | None = None) -> Slab:
        [dim] = normalize_dims(x, dim) or (0,)
        if not x.ndim or not (split := x.layout.splits[dim]):
            return x.with_local(function(x.local, dim, dtype=dtype))
        out_dtype = function(x.local.new_zeros(1), 0, dtype=dtype).dtype
        local = x.local.to(torch.float32 if out_dtype in SHORT else out_dtype)
        totals = gather_stacked(reduce(local, dim, keepdim=True), x.mesh, (split.axis,))
        before = reduce(totals[: x.mesh.coords[split.axis]], 0)
        return x.with_local(combine(function(local, dim), before).to(out_dtype))

    @define("reducing", getattr(Tensor, f"{name}_"))
    def cumulate_(self: Slab, dim: int, *, dtype: torch.dtype | None = None) -> Slab:
        # Of a copy, as its gradient may need what is overwritten.
        result: Any = cumulate(self.with_local(self.local.clone()), dim, dtype=dtype)
        self.local.copy_(result.local)
        return self


_make_cumulative("cumsum", "sum", "add")
_make_cumulative("cumprod", "prod", "mul")
