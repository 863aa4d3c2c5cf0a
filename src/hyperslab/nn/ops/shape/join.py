"""Tensors put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import Box, Exchange, Grid, Layout, Span, Split, cut_evenly, plan_exchange
from hyperslab.nn.op import define
from hyperslab.nn.ops.shape.dims import check_dim
from hyperslab.nn.placement import recut
from hyperslab.nn.slab import Slab, check_one_grid, everywhere

Tensors = Sequence[Slab | Tensor]


@define("shape", torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Tensors, dim: int = 0) -> Slab:
    """The tensors joined along ``dim``, under the layout of the most split Slab among them."""
    if isinstance(tensors, Slab):
        raise TypeError("cat joins a tuple or list of tensors, and was given one Slab")
    given = [t for t in tensors if isinstance(t, Slab)]
    first = max(given, key=lambda slab: (slab.shape != (0,), len(slab.layout.split_dims)))
    check_one_grid(slab.mesh.grid for slab in given)
    dim = check_dim(dim, first.ndim)
    # torch skips tensors of shape (0,), whatever the dims of the others.
    parts = [t for t in tensors if tuple(t.shape) != (0,)] or [first]
    for part in parts:
        same = len(part.shape) == first.ndim and all(
            n == m for d, (n, m) in enumerate(zip(part.shape, first.shape, strict=True)) if d != dim
        )
        if not same:
            shapes = [tuple(t.shape) for t in tensors]
            raise LayoutError(f"cat along dim {dim} of tensors that differ elsewhere: {shapes}")
    slabs = [everywhere(t, first) for t in parts]
    extent, split = sum(slab.shape[dim] for slab in slabs), first.layout.splits[dim]
    cuts = split and Split(split.axis, cut_evenly(extent, split.cuts.num))
    return join(slabs, dim, first.layout.with_dim(dim, extent, cuts))


def join(slabs: Sequence[Slab], dim: int, target: Layout) -> Slab:
    """The tensors joined along ``dim`` under ``target``: each rank fetches its part of each."""
    if target.splits[dim] is None:
        pieces = [recut(s, target.with_dim(dim, s.layout.shape[dim])).local for s in slabs]
        return slabs[0].with_local(torch.cat(pieces, dim), target)
    pieces, start = [], 0
    for slab in slabs:
        span = Span(start, start + slab.layout.shape[dim])
        exchange = _plan_part(slab.mesh.grid, slab.mesh.rank, slab.layout, target, dim, span)
        pieces.append(fetch(slab.local, exchange, slab.mesh))
        start = span.stop
    return slabs[0].with_local(torch.cat(pieces, dim), target)


@lru_cache(maxsize=1024)
def _plan_part(
    grid: Grid, rank: int, source: Layout, target: Layout, dim: int, place: Span
) -> Exchange:
    """Each rank asks for what it owns under ``target`` of a tensor that lies at ``place`` in it."""

    def wanted(rank: int) -> Box:
        box = target.box(grid.coords[rank])
        part = box.spans[dim] & place
        return box.with_span(dim, Span(part.start - place.start, part.stop - place.start))

    return plan_exchange(grid, rank, source, [wanted(r) for r in range(grid.num_ranks)])


@define("shape", torch.stack)
def stack(tensors: Tensors, dim: int = 0) -> Slab:
    """Tensors of one shape along a new dim."""
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) > 1:
        raise LayoutError(f"stack takes tensors of one shape, got {shapes}")
    dim = check_dim(dim, len(shapes[0]) + 1)
    return cat([t.unsqueeze(dim) for t in tensors], dim)


def _make_stack(names: Sequence[str], with_dims: Callable[..., Any], dim: int) -> None:
    @define("shape", *(getattr(torch, name) for name in names))
    def stack_along(tensors: Tensors) -> Slab:
        """Tensors joined along the dim that the function's name tells."""
        parts = [with_dims(t) for t in tensors]
        return cat(parts, min(dim, parts[0].ndim - 1))


def _as_column(t: Slab | Tensor) -> Slab | Tensor:
    return t if t.ndim > 1 else t.reshape(t.numel(), 1)


_make_stack(["hstack"], torch.atleast_1d, 1)
_make_stack(["vstack", "row_stack"], torch.atleast_2d, 0)
_make_stack(["dstack"], torch.atleast_3d, 2)
_make_stack(["column_stack"], _as_column, 1)
