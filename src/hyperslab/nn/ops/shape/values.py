"""Which values there are in the whole tensor, and how often: equal on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.agree import run_together
from hyperslab.comm.reduce import gather_stacked, reduce_sum
from hyperslab.nn.align import align
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.reduce.extremes import extreme_of
from hyperslab.nn.slab import Slab


@define("shape", torch.bincount, Tensor.bincount)
def bincount(x: Slab | Tensor, weights: Slab | Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number occurs, or the sum of the ``weights`` where it does."""
    if x.ndim != 1 or (weights is not None and weights.shape != x.shape):
        raise RuntimeError("bincount takes numbers in one dim, and as many weights")
    (numbers, shares), like = align([x, weights])
    x, dtype = like.with_local(numbers), torch.int64  # as torch counts where there is nothing
    if shares is not None and x.numel():
        dtype = torch.float32 if shares.dtype == torch.float32 else torch.float64
    largest = int(extreme_of(x, (0,), largest=True)) if x.numel() else -1

    def count() -> Tensor:
        return torch.bincount(numbers, shares, max(minlength, largest + 1)).to(dtype)

    return reduce_sum(run_together(count, x.mesh), x.mesh, x.layout.axes)


@define("shape", torch.unique, Tensor.unique)
def unique(
    x: Slab,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The values in ascending order, where each element is among them, and how often each occurs.

    Collective over the axes that split ``x``. Not differentiable.
    """
    piece = x.local.detach()
    if dim is not None:
        raise unsupported(torch.unique, x, "it compares slices along a dim")
    values = torch.unique(_all_values(torch.unique(piece), x))
    if not return_inverse and not return_counts:
        return values
    if values.is_floating_point() and bool(values.isnan().any()):
        raise unsupported(torch.unique, x, "there are NaNs, which are all different values")
    ordered = (values.byte(), piece.byte()) if values.dtype == torch.bool else (values, piece)
    places = torch.searchsorted(*ordered)
    inverse = (x.with_local(places),) if return_inverse else ()
    if not return_counts:
        return values, *inverse
    here = torch.bincount(places.flatten(), minlength=len(values))
    return values, *inverse, reduce_sum(here, x.mesh, x.layout.axes)


def _all_values(mine: Tensor, x: Slab) -> Tensor:
    """The values of all pieces, one after the other."""
    axes = x.layout.axes
    counts = gather_stacked(torch.tensor(len(mine), device=mine.device), x.mesh, axes).tolist()
    padded = mine.new_zeros(max(counts))
    padded[: len(mine)] = mine
    rows = gather_stacked(padded, x.mesh, axes)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
