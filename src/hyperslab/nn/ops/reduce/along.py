"""Functions that work along some dims and treat every other dim as a batch.

Where the dims that such a function works along are whole on every rank, it runs on the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperslab.comm.agree import run_together
from hyperslab.layout import Layout, Split, integers, split_alike
from hyperslab.nn.adopt import write_adopted
from hyperslab.nn.op import unsupported
from hyperslab.nn.placement import recut, whole_along
from hyperslab.nn.slab import Slab, check_one_grid, everywhere, is_slab, layout_of
from hyperslab.torch_private import tree_leaves

Shape = tuple[int, ...]


class AlongPlan(NamedTuple):
    batch: Layout
    """The layout of the results along the dims that are not worked along."""
    targets: tuple[Layout, ...]
    """The layout in which each operand takes part."""


class Refusal(NamedTuple):
    number: int
    """Of the operand that is in the way."""
    why: str


@lru_cache(maxsize=4096)
def plan_along(
    layouts: tuple[Layout, ...], dims: Shape, others: str, in_place: bool
) -> AlongPlan | Refusal:
    """The batch is split as in the first operand; else, if that is not written to, as in others.

    ``others`` says how further operands go with the first: see ``Along``.
    """
    ndim = max(len(layout.shape) for layout in (layouts if others == "broadcast" else layouts[:1]))
    members = [_takes_part(layout, ndim, others, first=not n) for n, layout in enumerate(layouts)]
    for number, (layout, member) in enumerate(zip(layouts, members, strict=True)):
        if not member and (why := _not_whole(layout, others)):
            return Refusal(number, why)
        if member and any(dim + ndim - len(layout.shape) in dims for dim in layout.split_dims):
            return Refusal(number, "it works along a split dim")
    leads = [layout for layout, member in zip(layouts, members, strict=True) if member]
    shape = _broadcast_shape(leads, ndim)
    batch = split_alike(shape, leads[:1] if in_place else leads)
    targets = []
    for number, (layout, member) in enumerate(zip(layouts, members, strict=True)):
        target = _cut_as(batch, layout, others) if member else layout
        if target is None:
            return Refusal(number, "its extents differ from another operand's along a split dim")
        targets.append(target)
    return AlongPlan(batch, tuple(targets))


def _takes_part(layout: Layout, ndim: int, others: str, *, first: bool) -> bool:
    """Whether an operand has the dims of the batch."""
    return first or others == "broadcast" or (others == "alike" and len(layout.shape) == ndim)


def _not_whole(layout: Layout, others: str) -> str:
    """Why an operand without the dims of the batch cannot be used as it is, or nothing."""
    if layout.split_dims:
        return "it must be whole on every rank"
    most = {"alike": 1, "numbers": 0}.get(others, len(layout.shape))
    return "" if len(layout.shape) <= most else "its dims are not those of the first operand"


def _broadcast_shape(layouts: Sequence[Layout], ndim: int) -> Shape:
    shape = [1] * ndim
    for layout in layouts:
        for dim, extent in enumerate(layout.shape, ndim - len(layout.shape)):
            shape[dim] = extent if shape[dim] == 1 else shape[dim]
    return tuple(shape)


def _cut_as(batch: Layout, layout: Layout, others: str) -> Layout | None:
    """The layout of an operand that goes with ``batch``; None where its extents do not fit."""
    behind = len(batch.shape) - len(layout.shape)
    splits: list[Split | None] = []
    for dim, extent in enumerate(layout.shape, behind):
        split = batch.splits[dim]
        stretched = extent == 1 and others == "broadcast"
        if split and extent != batch.shape[dim] and not stretched:
            return None
        splits.append(split if extent == batch.shape[dim] else None)
    return Layout(layout.shape, tuple(splits))


Pick = Callable[[Shape, tuple[Any, ...], dict[str, Any]], Any]
"""The dims that a call works along (None: all), from the shape and the call's arguments."""


class Along(NamedTuple):
    """How a function works along dims."""

    dims: Pick
    keeps: bool | int = True
    """Whether its results keep these dims; a number is the place of the argument ``keepdim``."""
    others: str = "alike"
    """How its further tensors go with the first: ``alike`` are cut as it is (vectors are whole),
    ``broadcast`` against it, ``whole`` are used as they are on every rank, ``numbers`` are 0-d."""
    in_front: Callable[..., int] = lambda *_, **__: 0
    """How many new dims its results have in front of the batch."""
    takes_empty: bool = True
    """Whether torch runs it on a batch of nothing."""
    looks: bool = False
    """Whether values, such as an index out of range, can make it raise."""

    def keeps_dims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if isinstance(self.keeps, bool):
            return self.keeps
        named = kwargs.get("keepdim", kwargs.get("keepdims", False))
        return bool(args[self.keeps] if len(args) > self.keeps else named)


def run_along(
    function: Callable[..., Any],
    along: Along,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_place: bool = False,
) -> Any:
    """What ``function`` gives for global tensors that are whole along the dims it works along.

    Channels that are split become so first, and are whole in what it gives.
    """
    operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Slab | Tensor)]
    like = _check(function, args, kwargs, operands)
    if in_place and isinstance(operands[0], Tensor):

        def write(x: Slab) -> Any:
            return run_along(function, along, (x, *args[1:]), kwargs, in_place=True)

        return write_adopted(function, operands[0], operands, write)
    layouts = tuple(map(layout_of, operands))
    shape = layouts[0].shape
    if along.others == "broadcast":
        shape = (1,) * (max(len(layout.shape) for layout in layouts) - len(shape)) + shape
    dims = normalized(along.dims(shape, args, kwargs), len(shape))
    if not in_place and (gathered := _with_whole_channels(operands, dims, len(shape), along)):
        args = tuple(gathered.get(id(arg), arg) for arg in args)
        kwargs = {name: gathered.get(id(arg), arg) for name, arg in kwargs.items()}
        return run_along(function, along, args, kwargs)
    plan = plan_along(layouts, dims, along.others, in_place)
    if isinstance(plan, Refusal):
        blocking = like.with_local(like.local, layouts[plan.number])
        raise unsupported(function, blocking, plan.why)
    batch = like.with_local(like.local, plan.batch)
    pieces = pieces_of(operands, plan, like)
    empty = [] if along.takes_empty else _empty_dims(batch)
    if empty:
        pieces[id(operands[0])] = with_one(pieces[id(operands[0])], empty)

    def run() -> Any:
        return function(
            *(pieces.get(id(arg), arg) for arg in args),
            **{name: pieces.get(id(arg), arg) for name, arg in kwargs.items()},
        )

    out = run_together(run, like.mesh) if along.looks and plan.batch.split_dims else run()
    if in_place:
        return operands[0]
    gone = () if along.keeps_dims(args, kwargs) else dims
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    sources = [None] * along.in_front(*args, **kwargs) + kept
    for dim in empty:
        out = out.narrow(sources.index(dim), 0, 0)
    return _wrapped(function, out, batch, sources)


def _with_whole_channels(
    operands: Sequence[Slab | Tensor], dims: Shape, ndim: int, along: Along
) -> dict[int, Slab]:
    """By id, the operands that the channel axis cuts along one of ``dims``, whole along it.

    A mesh with that axis cuts all tensors of a network, and their author works along channels as
    ever. Other axes cut what is too large for a rank: to gather that is left to the author.
    """
    found = {}
    for number, x in enumerate(operands):
        if isinstance(x, Slab) and _takes_part(x.layout, ndim, along.others, first=not number):
            splits = enumerate(x.layout.splits, ndim - x.ndim)
            cut = [dim for dim, split in splits if split and split.axis == "channel"]
            if cut and cut[0] in dims:
                found[id(x)] = whole_along(x, [cut[0] - ndim + x.ndim])
    return found


def normalized(dims: Any, ndim: int) -> Shape:
    """``dims`` as non-negative dims; None are all dims."""
    if dims is None:
        return tuple(range(ndim))
    reach = max(ndim, 1)
    picked = integers(dims)
    for dim in picked:
        if not -reach <= dim < reach:
            raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return tuple(dim % ndim for dim in picked) if ndim else ()


def _check(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[Slab | Tensor],
) -> Slab:
    """The first Slab among the operands, if they are such as can be worked with."""
    slabs = [operand for operand in operands if isinstance(operand, Slab)]
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    nested = next(filter(is_slab, tree_leaves(lists, is_leaf=is_slab)), None) if lists else None
    if nested is not None:
        raise unsupported(function, nested, "it stands in a list")
    check_one_grid(slab.mesh.grid for slab in slabs)
    return slabs[0]


def pieces_of(operands: list[Any], plan: AlongPlan, like: Slab) -> dict[int, Tensor]:
    """This rank's piece of each operand as it takes part, by the operand's id."""
    return {
        id(t): recut(everywhere(t, like), target).local
        for t, target in zip(operands, plan.targets, strict=True)
    }


def _empty_dims(x: Slab) -> list[int]:
    """The split dims along which this rank holds nothing."""
    return [dim for dim in x.layout.split_dims if not x.box.spans[dim].size]


def with_one(piece: Tensor, dims: list[int]) -> Tensor:
    """``piece`` with one more element along ``dims``."""
    for dim in dims:
        shape = [1 if d == dim else n for d, n in enumerate(piece.shape)]
        piece = torch.cat([piece, piece.new_ones(shape)], dim)
    return piece


def _wrapped(function: Callable[..., Any], out: Any, batch: Slab, sources: list[int | None]) -> Any:
    """Tensors in ``out`` as Slabs; ``sources`` are the dims of the batch that theirs are."""
    if isinstance(out, tuple | list):
        make: Any = type(out)
        return make(_wrapped(function, each, batch, sources) for each in out)
    if not isinstance(out, Tensor):
        return out
    box, shape = batch.box, list(out.shape)
    splits: list[Split | None] = [None] * out.ndim
    for place, dim in enumerate(sources):
        if dim is None or not (split := batch.layout.splits[dim]):
            continue
        if place >= out.ndim or shape[place] != box.spans[dim].size:
            raise unsupported(function, batch, "its result does not follow the batch")
        splits[place], shape[place] = split, batch.layout.shape[dim]
    return batch.with_local(out, Layout(tuple(shape), tuple(splits))) if out.ndim else out
