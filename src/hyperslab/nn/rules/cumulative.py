"""Sums and products of all elements up to each, along any dim of the global tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.reduce import gather_stacked
from hyperslab.nn.registry import numpy_names, register
from hyperslab.nn.rules.reduction import SHORT, normalize_dims, refuse_out
from hyperslab.nn.slab import Slab


def _make_cumulative(name: str, of_all: str, join: str) -> None:
    """``name`` along a dim is, on each rank, that of its piece, joined with that before it."""
    function, reduce, combine = (getattr(torch, each) for each in (name, of_all, join))

    @register(function, getattr(Tensor, name))
    @numpy_names
    def cumulate(
        input: Slab,
        dim: int,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | Slab | None = None,
    ) -> Slab:
        x = input
        refuse_out(function, x, out)
        [dim] = normalize_dims(x, dim) or (0,)
        if not x.ndim or not (split := x.layout.splits[dim]):
            return x.with_local(function(x.local, dim, dtype=dtype))
        kind = function(x.local.new_zeros(1), 0, dtype=dtype).dtype
        local = x.local.to(torch.float32 if kind in SHORT else kind)
        totals = gather_stacked(reduce(local, dim, keepdim=True), x.mesh, (split.axis,))
        before = reduce(totals[: x.mesh.coords[split.axis]], 0)
        return x.with_local(combine(function(local, dim), before).to(kind))

    @register(getattr(Tensor, f"{name}_"))
    @numpy_names
    def cumulate_(self: Slab, dim: int, *, dtype: torch.dtype | None = None) -> Slab:
        # Of a copy, as its gradient may need what is overwritten.
        result: Any = cumulate(self.with_local(self.local.clone()), dim, dtype=dtype)
        self.local.copy_(result.local)
        return self


_make_cumulative("cumsum", "sum", "add")
_make_cumulative("cumprod", "prod", "mul")
