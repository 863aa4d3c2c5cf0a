"""Pointwise functions of large tensors, with temporaries that are not as large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hyperslab.kernels import tiles
from hyperslab.kernels.tiles import Each, outermost_first, own_of, pick_tiles

Slices = tuple[slice, ...]


def map_chunks(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """What the pointwise ``function`` makes of tensors that broadcast to ``x``, in its dtype."""
    chunks = _chunks(x)
    if not chunks:
        return function(x, *others).to(x.dtype)
    out = torch.empty_like(x)
    for chunk in chunks:
        out[chunk] = function(x[chunk], *(_part(t, chunk) for t in others))
    return out


def sum_chunks(
    function: Callable[..., Tensor],
    dims: tuple[int, ...],
    dtype: torch.dtype,
    x: Tensor,
    *others: Tensor,
) -> Tensor:
    """The sum over ``dims``, which are kept, of what ``map_chunks`` would make."""
    chunks = _chunks(x)
    if not chunks:
        return function(x, *others).sum(dims, keepdim=True, dtype=dtype)
    shape = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
    total = torch.zeros(shape, dtype=dtype, device=x.device)
    for chunk in chunks:
        made = function(x[chunk], *(_part(t, chunk) for t in others))
        _part(total, chunk).add_(made.sum(dims, keepdim=True, dtype=dtype))
    return total


def _chunks(x: Tensor) -> list[Slices]:
    """The slices of ``x`` that are taken one by one; none where that would gain nothing."""
    limit = tiles.TILE_NUMEL
    if x.numel() <= limit or torch.is_grad_enabled():  # autograd would keep all temporaries
        return []
    return [own_of(t) for t in pick_tiles(tuple(map(Each, x.shape)), outermost_first(x), limit)]


def _part(t: Tensor, chunk: Slices) -> Tensor:
    """The part of ``t`` that is broadcast to ``chunk``."""
    slices = [slice(None) if n == 1 else one for n, one in zip(t.shape, chunk, strict=True)]
    return t[tuple(slices)]
