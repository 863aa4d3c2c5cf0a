"""``x[index]``, choosing by tensors of indices, and parts along one dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import (
    Chosen,
    Cuts,
    Entry,
    Layout,
    Split,
    cut_evenly,
    integers,
    output_cuts,
    plan_index,
    plan_windows,
)
from hyperslab.nn.align import check_operands
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.shape.dims import check_dim
from hyperslab.nn.ops.shape.entries import (
    Tensors,
    as_entry,
    as_tuple,
    check_indices,
    is_mask,
    parse_index,
)
from hyperslab.nn.slab import Slab
from hyperslab.nn.view_copy import fetch_view, plain_if_number, recut_view


@define("shape", Tensor.__getitem__)
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
        (*extents[:at], *shape, *extents[at:]), (*splits[:at], *[None] * len(shape), *splits[at:])
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


def take_along(x: Slab, dim: int, pick: int | range) -> Slab:
    """One index of ``x`` along ``dim``, or a slice."""
    entries: list[Entry] = [range(extent) for extent in x.layout.shape]
    entries[dim] = pick
    return take(x, tuple(entries))


@define("shape", torch.narrow, Tensor.narrow)
def narrow(x: Slab | Tensor, dim: int, start: int | Slab | Tensor, length: int) -> Slab:
    """``length`` indices along ``dim`` from ``start`` on, which may count from the end."""
    if isinstance(start, Slab | Tensor):
        check_operands(torch.narrow, x, start)
        if start.ndim or start.dtype.is_floating_point or start.dtype == torch.bool:
            raise LayoutError(f"start must be one integer, got {start}")
    assert isinstance(x, Slab)
    dim = check_dim(dim, x.ndim)
    extent, first = x.layout.shape[dim], int(start)
    if not -extent <= first <= extent:
        raise IndexError(f"start {first} is out of range for dim {dim} of extent {extent}")
    first += extent if first < 0 else 0
    if length < 0 or first + length > extent:
        raise LayoutError(
            f"{length} indices from {first} on do not fit dim {dim} of extent {extent}"
        )
    return take_along(x, dim, range(first, first + length))


@define("shape", torch.select, Tensor.select)
def select(x: Slab, dim: int, index: int) -> Slab | Tensor:
    """The one ``index`` along ``dim``, which is dropped."""
    dim = check_dim(dim, x.ndim)
    extent, at = x.layout.shape[dim], as_entry(x, index)
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is out of range for dim {dim} of extent {extent}")
    return plain_if_number(take_along(x, dim, at % extent))


@define("shape", torch.unbind, Tensor.unbind)
def unbind(x: Slab, dim: int = 0) -> tuple[Slab | Tensor, ...]:
    """Every index along ``dim`` by itself; a split dim becomes whole on every rank for it."""
    dim = check_dim(dim, x.ndim)
    x = recut_view(x, x.layout.whole_along([dim]))
    parts = [take_along(x, dim, index) for index in range(x.layout.shape[dim])]
    return tuple(map(plain_if_number, parts))


@define("shape", torch.split, torch.unsafe_split, Tensor.unsafe_split)
def split(
    tensor: Slab, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[Slab, ...]:
    """Parts of one size along ``dim``, the last one smaller if need be, or of the sizes given."""
    x, dim = tensor, check_dim(dim, tensor.ndim)
    extent = x.layout.shape[dim]
    if not hasattr(split_size_or_sections, "__index__"):
        sizes = integers(split_size_or_sections)
        if sum(sizes) != extent or min(sizes, default=0) < 0:
            raise LayoutError(f"sizes {sizes} do not add up to the extent {extent} of dim {dim}")
        return _parts(x, dim, list(accumulate(sizes, initial=0)))
    (size,) = integers(split_size_or_sections)
    if size < 0 or (size == 0 and extent):
        raise LayoutError(f"a size of {size} cannot split dim {dim} of extent {extent}")
    return _parts(x, dim, [*range(0, extent, size or 1), extent] if extent else [0, 0])


def _parts(x: Slab, dim: int, bounds: Sequence[int]) -> tuple[Slab, ...]:
    """The slices of ``x`` along ``dim`` between neighbouring ``bounds``, as Python reads them."""
    extent = x.layout.shape[dim]
    slices = [slice(a, b) for a, b in pairwise(bounds)]
    return tuple(take_along(x, dim, range(*part.indices(extent))) for part in slices)


@define("shape", Tensor.split)
def split_method(self: Slab, split_size: int | Sequence[int], dim: int = 0) -> tuple[Slab, ...]:
    """``split`` by its name in ``Tensor``."""
    return split(self, split_size, dim)


@define("shape", torch.split_with_sizes, Tensor.split_with_sizes)
def split_with_sizes(x: Slab, split_sizes: Sequence[int], dim: int = 0) -> tuple[Slab, ...]:
    """``split`` into parts of the sizes given."""
    return split(x, split_sizes, dim)


@define("shape", torch.chunk, Tensor.chunk, torch.unsafe_chunk, Tensor.unsafe_chunk)
def chunk(x: Slab, chunks: int, dim: int = 0) -> tuple[Slab, ...]:
    """At most ``chunks`` parts of one size along ``dim``, the last one smaller if need be."""
    dim = check_dim(dim, x.ndim)
    if chunks < 1:
        raise LayoutError(f"chunks must be at least 1, got {chunks}")
    extent = x.layout.shape[dim]
    return split(x, -(-extent // chunks), dim) if extent else _parts(x, dim, [0] * (chunks + 1))


@define("shape", torch.tensor_split, Tensor.tensor_split)
def tensor_split(
    x: Slab | Tensor, *given: Any, dim: int | None = None, **names: Any
) -> tuple[Slab, ...]:
    """As many parts along a dim as asked for, of nearly one size, or those between indices."""
    if dim is None:
        dim = given[1] if len(given) > 1 else 0
    (where,) = given[:1] or names.values()
    x = check_operands(torch.tensor_split, x, where)
    dim = check_dim(dim, x.ndim)
    if isinstance(where, Tensor):
        where = where.tolist()
    extent = x.layout.shape[dim]
    if not hasattr(where, "__index__"):
        return _parts(x, dim, [0, *integers(where), extent])
    if where < 1:
        raise LayoutError(f"a tensor is split into at least 1 part, not {where}")
    return _parts(x, dim, cut_evenly(extent, int(where)).bounds)


def _make_axis_split(name: str, least_dims: int, dim: int) -> None:
    function = getattr(torch, name)

    @define("shape", function, getattr(Tensor, name))
    def axis_split(x: Slab, *given: Any, **names: Any) -> tuple[Slab, ...]:
        """``tensor_split`` along the dim that the function's name tells."""
        at = min(dim, x.ndim - 1)
        (where,) = given or names.values()
        if x.ndim < least_dims:
            raise LayoutError(f"{name} takes at least {least_dims} dims, got {tuple(x.shape)}")
        if hasattr(where, "__index__") and (where < 1 or x.layout.shape[at] % where):
            raise LayoutError(f"{name}: {where} parts do not divide shape {tuple(x.shape)} evenly")
        return tensor_split(x, where, at)


for _name, _least_dims, _dim in (("hsplit", 1, 1), ("vsplit", 2, 0), ("dsplit", 3, 2)):
    _make_axis_split(_name, _least_dims, _dim)


@define("shape", torch.index_select, Tensor.index_select)
def index_select(x: Slab | Tensor, dim: int, index: Slab | Tensor) -> Slab:
    """``x`` at the indices of a list along ``dim``."""
    x = check_operands(torch.index_select, x, index)
    assert isinstance(index, Tensor)
    dim = check_dim(dim, x.ndim)
    if index.ndim > 1 or index.dtype not in (torch.int32, torch.int64):
        raise IndexError(
            f"index_select takes a list of integers, got {tuple(index.shape)} of {index.dtype}"
        )
    if not index.is_cuda:
        check_indices(index, x.layout.shape[dim], dim, from_end=False)
    return choose_along(x, dim, index.reshape(-1))


@define("shape", torch.diagonal, Tensor.diagonal)
def diagonal(x: Slab, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Slab:
    """The diagonals of two dims, which are whole on every rank, as a new last dim."""
    dims = check_dim(dim1, x.ndim), check_dim(dim2, x.ndim)
    if any(x.layout.splits[dim] for dim in dims):
        raise unsupported(torch.diagonal, x, "a dim of the diagonal is split")
    local = x.local.diagonal(offset, *dims)
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    shape = (*(x.layout.shape[dim] for dim in kept), local.shape[-1])
    return x.viewed(local, Layout(shape, (*(x.layout.splits[dim] for dim in kept), None)))
