"""``x[index]``, and choosing by tensors of indices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.layout import (
    Chosen,
    Cuts,
    Entry,
    Layout,
    Split,
    output_cuts,
    plan_index,
    plan_windows,
)
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.rules.entries import Tensors, as_tuple, check_indices, is_mask, parse_index
from hyperslab.nn.slab import Slab
from hyperslab.nn.view_copy import fetch_view, plain_if_number


@register(Tensor.__getitem__)
def getitem(x: Slab | Tensor, index: Any) -> Slab | Tensor:
    """``x[index]``: a view of ``x`` where torch gives one and nothing has to move."""
    if not isinstance(x, Slab):
        return _look_up(x, index)
    entries, tensors = parse_index(x, index)
    taken = take(x, entries)
    return choose(taken, tensors) if tensors else plain_if_number(taken)


def take(x: Slab, entries: tuple[Entry, ...]) -> Slab:
    """``x`` indexed by numbers and slices, one a dim, with a new dim for each None."""
    plan = plan_index(x.mesh.grid, x.mesh.rank, x.layout, entries)
    if not plan.moves:
        return x.viewed(x.local[plan.direct], plan.output, is_part=plan.is_part)
    fetched = fetch_view(x, x.local[plan.before], plan.exchange, plan.output)
    return fetched.viewed(fetched.local[plan.after], plan.output)


def _look_up(table: Tensor, index: Any) -> Slab:
    """The rows of a plain tensor that a Slab of integers names."""
    given = as_tuple(index)
    slab = next(entry for entry in given if isinstance(entry, Slab))
    if len(given) > 1 or is_mask(slab.local) or not table.ndim:
        raise unsupported(Tensor.__getitem__, slab, "it is a mask, or one of several indices")
    rest = tuple(table.shape[1:])
    layout = Layout(slab.layout.shape + rest, slab.layout.splits + (None,) * len(rest))
    return slab.with_local(table[slab.local], layout)


def choose(x: Slab, tensors: Tensors) -> Slab:
    """``x`` indexed by tensors, each along its dim, that broadcast against each other."""
    split = [dim for dim in tensors if x.layout.splits[dim]]
    if split and len(tensors) > 1:
        why = f"several tensors index it, one of them along dim {split[0]}, which is split"
        raise unsupported(Tensor.__getitem__, x, why)
    if split:
        return choose_along(x, split[0], tensors[split[0]])
    return x.with_local(x.local[local_index(tensors)], chosen_layout(x.layout, tensors))


def local_index(tensors: Tensors) -> tuple[Tensor | slice, ...]:
    return tuple(tensors.get(dim, slice(None)) for dim in range(max(tensors) + 1))


def chosen_layout(layout: Layout, tensors: Tensors) -> Layout:
    """The layout of what ``tensors`` choose along whole dims.

    Their dims stand where those that they index stood, or first, if those are not in a row.
    """
    shape = tuple(torch.broadcast_shapes(*(indices.shape for indices in tensors.values())))
    dims = sorted(tensors)
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    kept = [dim for dim in range(len(layout.shape)) if dim not in tensors]
    extents, splits = [layout.shape[dim] for dim in kept], [layout.splits[dim] for dim in kept]
    return Layout(
        (*extents[:at], *shape, *extents[at:]),
        (*splits[:at], *[None] * len(shape), *splits[at:]),
    )


def choose_along(x: Slab, dim: int, indices: Tensor) -> Slab:
    """``x`` at ``indices`` along ``dim``, in whose place the dims of ``indices`` stand.

    Along a split dim each rank fetches the inputs from the first to the last that its outputs read;
    for indices in ascending order nothing moves.
    """
    extent, split = x.layout.shape[dim], x.layout.splits[dim]
    piece, layout = x.local, chosen_layout(x.layout.whole_along([dim]), {dim: indices})
    flat = torch.where(indices < 0, indices + extent, indices).flatten().long()
    if split and not flat.numel():
        piece = piece.narrow(dim, 0, 0)
    elif split:
        check_indices(indices, extent, dim)
        reads = Chosen(tuple(flat.tolist()), block=math.prod(indices.shape[1:]))
        windows = tuple(reads if d == dim else None for d in range(x.ndim))
        # Long lists of indices are seldom the same twice, so the plan is not kept.
        planned = plan_windows.__wrapped__(x.mesh.grid, x.mesh.rank, x.layout, windows)
        piece = fetch(x.local, planned.exchange, x.mesh)
        owned, fetched = planned.box.spans[dim], planned.exchange.wanted.spans[dim]
        flat = flat[owned.start : owned.stop] - fetched.start
        bounds = output_cuts(reads, split.cuts).bounds
        rows = Cuts(tuple(bound // reads.block for bound in bounds))
        layout = layout.with_dim(dim, rows.extent, Split(split.axis, rows))
    chosen = piece.index_select(dim, flat.to(piece.device))
    return x.with_local(chosen.reshape(layout.box(x.mesh.coords).shape), layout)
