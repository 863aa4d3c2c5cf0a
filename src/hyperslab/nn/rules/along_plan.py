"""How operands are cut for a function that works along some dims: the others are its batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hyperslab.layout import Layout, Split

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
    batch = Layout(shape, _splits(shape, leads[:1] if in_place else leads))
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


def _splits(shape: Shape, layouts: Sequence[Layout]) -> tuple[Split | None, ...]:
    """Each dim's first split that is one of the whole extent, and of an axis not yet taken."""
    ndim, splits = len(shape), dict[int, Split]()
    for layout in layouts:
        for dim, split in enumerate(layout.splits, ndim - len(layout.shape)):
            whole = layout.shape[dim - ndim] == shape[dim]
            taken = {chosen.axis for chosen in splits.values()}
            if split and whole and dim not in splits and split.axis not in taken:
                splits[dim] = split
    return tuple(splits.get(dim) for dim in range(ndim))


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
