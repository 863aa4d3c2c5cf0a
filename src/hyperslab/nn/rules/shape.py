"""Functions that rearrange dims and join tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import (
    Box,
    Exchange,
    Grid,
    Layout,
    Span,
    Split,
    cut_evenly,
    infer_shape,
    plan_exchange,
    plan_reshape,
)
from hyperslab.nn.recut import recut
from hyperslab.nn.registry import integers, numpy_names, register, unsupported
from hyperslab.nn.slab import Slab, check_one_grid


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def _unpacked(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dims given one by one or as one sequence."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else args


@register(Tensor.view, Tensor.reshape, torch.reshape)
def reshape(input: Slab, *shape: Any, **kwargs: Any) -> Slab | Tensor:
    """``input`` in another global shape; see ``plan_reshape`` for what stays split."""
    x = input
    sizes = _unpacked(shape or (kwargs.pop("shape", kwargs.pop("size", None)),))
    if kwargs or any(isinstance(size, torch.dtype) for size in sizes):
        raise unsupported(Tensor.view, x, "a view as another dtype is not supported")
    target = infer_shape(integers(sizes), x.numel())
    before, after = plan_reshape(x.layout, target)
    local = recut(x, before).local.reshape(after.box(x.mesh.coords).shape)
    return x.with_local(local, after) if after.shape else local


@register(torch.flatten, Tensor.flatten)
def flatten(input: Slab, start_dim: int = 0, end_dim: int = -1) -> Slab | Tensor:
    """``input`` with the dims from ``start_dim`` to ``end_dim`` merged."""
    x = input
    if not x.ndim:
        return reshape(x, 1)
    first, last = _dim(start_dim, x.ndim), _dim(end_dim, x.ndim)
    if first > last:
        raise LayoutError(
            f"flatten from dim {start_dim} to {end_dim} of {x.ndim} dims runs backwards"
        )
    shape = x.layout.shape
    merged = math.prod(shape[first : last + 1])
    return reshape(x, *shape[:first], merged, *shape[last + 1 :])


@register(torch.unsqueeze, Tensor.unsqueeze)
@numpy_names
def unsqueeze(input: Slab, dim: int) -> Slab:
    """``input`` with a dim of extent 1 before ``dim``."""
    x = input
    at = _dim(dim, x.ndim + 1)
    shape, splits = x.layout.shape, x.layout.splits
    layout = Layout((*shape[:at], 1, *shape[at:]), (*splits[:at], None, *splits[at:]))
    return x.with_local(x.local.unsqueeze(at), layout)


@register(torch.squeeze, Tensor.squeeze)
@numpy_names
def squeeze(input: Slab, dim: int | Sequence[int] | None = None) -> Slab | Tensor:
    """``input`` without its dims of extent 1, or those of them in ``dim``."""
    x = input
    dims = range(x.ndim) if dim is None else integers(dim)
    gone = {_dim(d, x.ndim) for d in dims} if x.ndim else set()
    kept = [n for d, n in enumerate(x.layout.shape) if d not in gone or n != 1]
    return reshape(x, *kept) if kept else reshape(x, ())


@register(torch.permute, Tensor.permute)
def permute(input: Slab, *dims: Any, **kwargs: Any) -> Slab:
    """``input`` with its dims, and their splits, in another order."""
    x = input
    order = [_dim(d, x.ndim) for d in _unpacked(dims or (kwargs["dims"],))]
    layout = Layout(
        tuple(x.layout.shape[d] for d in order), tuple(x.layout.splits[d] for d in order)
    )
    return x.with_local(x.local.permute(order), layout)


@register(torch.transpose, Tensor.transpose, torch.swapdims, Tensor.swapdims)
def transpose(input: Slab, dim0: int, dim1: int) -> Slab:
    """``input`` with two dims exchanged."""
    order = list(range(input.ndim))
    first, second = _dim(dim0, input.ndim), _dim(dim1, input.ndim)
    order[first], order[second] = second, first
    return permute(input, order)


@register(torch.swapaxes, Tensor.swapaxes)
def swapaxes(input: Slab, axis0: int, axis1: int) -> Slab:
    """``transpose`` by another name."""
    return transpose(input, axis0, axis1)


register(torch.numel)(Slab.numel)
register(torch.is_floating_point)(Slab.is_floating_point)
register(torch.is_complex)(Slab.is_complex)


@register(torch.cat, torch.concat, torch.concatenate)
@numpy_names
def cat(
    tensors: Sequence[Slab | Tensor], dim: int = 0, *, out: Slab | Tensor | None = None
) -> Slab:
    """The tensors joined along ``dim``, under the layout of the most split Slab among them."""
    given = [t for t in tensors if isinstance(t, Slab)]
    first = max(given, key=lambda slab: (slab.shape != (0,), len(slab.layout.split_dims)))
    if out is not None:
        raise unsupported(torch.cat, first, "out= is not supported")
    check_one_grid(slab.mesh.grid for slab in given)
    dim = _dim(dim, first.ndim)
    # torch skips tensors of shape (0,), whatever the dims of the others.
    parts = [t for t in tensors if tuple(t.shape) != (0,)] or [first]
    for part in parts:
        same = len(part.shape) == first.ndim and all(
            n == m for d, (n, m) in enumerate(zip(part.shape, first.shape, strict=True)) if d != dim
        )
        if not same:
            shapes = [tuple(t.shape) for t in tensors]
            raise LayoutError(f"cat along dim {dim} of tensors that differ elsewhere: {shapes}")
    slabs = [t if isinstance(t, Slab) else _whole(t, first) for t in parts]
    if first.layout.splits[dim] is None:
        return _cat_whole_dim(slabs, first, dim)
    return _cat_split_dim(slabs, first, dim)


def _whole(t: Tensor, like: Slab) -> Slab:
    return like.with_local(t, Layout.unsplit(t.shape))


def _cat_whole_dim(slabs: list[Slab], first: Slab, dim: int) -> Slab:
    local = torch.cat(
        [recut(s, first.layout.with_dim(dim, s.shape[dim])).local for s in slabs], dim
    )
    return first.with_local(local, first.layout.with_dim(dim, sum(s.shape[dim] for s in slabs)))


def _cat_split_dim(slabs: list[Slab], first: Slab, dim: int) -> Slab:
    """Each rank fetches its part of every tensor; the joined dim is cut evenly."""
    split = first.layout.splits[dim]
    assert split is not None
    extent = sum(slab.shape[dim] for slab in slabs)
    cuts = Split(split.axis, cut_evenly(extent, split.cuts.num))
    target = first.layout.with_dim(dim, extent, cuts)
    pieces, start = [], 0
    for slab in slabs:
        span = Span(start, start + slab.shape[dim])
        exchange = _plan_part(slab.mesh.grid, slab.mesh.rank, slab.layout, target, dim, span)
        pieces.append(fetch(slab.local, exchange, slab.mesh))
        start = span.stop
    return first.with_local(torch.cat(pieces, dim), target)


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
