"""Operands of one pointwise function, brought to one layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.layout import Box, Layout, split_alike
from hyperslab.nn.op import name_of, unsupported
from hyperslab.nn.placement import recut
from hyperslab.nn.slab import Slab, check_one_grid


def align(operands: Sequence[Any], to: Slab | None = None) -> tuple[list[Any], Slab]:
    """The local operands of a broadcasting function, and a Slab whose layout is that of the result.

    Slabs are re-cut to the layout of the largest of them (of ``to``, where the function writes into
    it); plain tensors, whole on every rank, are narrowed to this rank's box.
    """
    slabs = [operand for operand in operands if isinstance(operand, Slab)]
    lead = max(slabs, key=Slab.numel) if to is None else to
    if any(slab.mesh is not lead.mesh for slab in slabs):
        check_one_grid(slab.mesh.grid for slab in slabs)
    if not any(isinstance(operand, Tensor) for operand in operands) and all(
        slab.layout == lead.layout for slab in slabs
    ):
        return [x.local if isinstance(x, Slab) else x for x in operands], lead
    shapes = tuple(tuple(x.shape) for x in operands if isinstance(x, Slab | Tensor))
    layout = broadcast_layout(lead.layout, tuple(slab.layout for slab in slabs), shapes)
    if to is not None:
        if layout.shape != to.layout.shape:
            raise LayoutError(
                f"a result of shape {layout.shape} cannot be written into a tensor of shape "
                f"{to.layout.shape}"
            )
        layout = to.layout
    box = layout.box(lead.mesh.coords)
    return [localize(operand, layout, box) for operand in operands], Slab(
        lead.local, layout, lead.mesh
    )


def localize(operand: Any, layout: Layout, box: Box) -> Any:
    """The part of ``operand`` that broadcasts against this rank's ``box`` under ``layout``."""
    if isinstance(operand, Slab):
        return recut(operand, _restricted(layout, operand.layout.shape)).local
    if isinstance(operand, Tensor) and layout.split_dims:
        behind = len(layout.shape) - operand.ndim
        for dim in layout.split_dims:
            if dim >= behind and operand.shape[dim - behind] == layout.shape[dim]:
                span = box.spans[dim]
                operand = operand.narrow(dim - behind, span.start, span.size)
    return operand


def layout_of_channels(x: Slab) -> Layout:
    """That of one number for each channel, dim 1 of ``x``, cut as the channels are."""
    return Layout(x.layout.shape[1:2], x.layout.splits[1:2])


def of_channels(x: Slab, vector: Slab | Tensor | None) -> Tensor | None:
    """The numbers of ``vector``, one for each channel, for those that this rank holds of ``x``."""
    if vector is None or (isinstance(vector, Tensor) and not x.layout.splits[1]):
        return vector
    layout = layout_of_channels(x)
    found: Tensor = localize(vector, layout, layout.box(x.mesh.coords))
    return found


def check_input(function: Callable[..., Any], x: Slab | Tensor) -> Slab:
    """``x``, if it is a Slab: weights may be, and then a plain tensor meets cut weights."""
    if not isinstance(x, Slab):
        raise UnsupportedOp(
            f"{name_of(function)} cannot run on a plain tensor of shape {tuple(x.shape)} with "
            "weights that are cut over ranks: give it a Slab, as hyperslab.shard makes it"
        )
    return x


def check_operands(
    function: Callable[..., Any], x: Slab | Tensor, *weights: Slab | Tensor | None
) -> Slab:
    """``x``, where ``weights`` are plain tensors, which every rank holds whole."""
    for weight in weights:
        if isinstance(weight, Slab):
            raise unsupported(function, weight, "all but its input must be plain tensors")
    assert isinstance(x, Slab)  # as one of the arguments is
    return x


@lru_cache(maxsize=4096)
def broadcast_layout(
    lead: Layout, layouts: tuple[Layout, ...], shapes: tuple[tuple[int, ...], ...]
) -> Layout:
    """The layout of the result: each dim split as in ``lead``, else as in another Slab."""
    return split_alike(torch.broadcast_shapes(*shapes), (lead, *layouts))


@lru_cache(maxsize=4096)
def _restricted(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout in which an operand of ``shape`` broadcasts against ``layout`` piece by piece."""
    behind = len(layout.shape) - len(shape)
    splits = [
        layout.splits[behind + dim] if extent == layout.shape[behind + dim] else None
        for dim, extent in enumerate(shape)
    ]
    return Layout(shape, tuple(splits))
