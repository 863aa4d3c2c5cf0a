"""Functions that make each element of a tile of elements at the same place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.layout import Box, Layout, Span
from hyperslab.nn.align import broadcast_layout
from hyperslab.nn.depth_first.tile_slab import TileSlab, not_by_tiles, tile_rule
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import OPS, Function, writes_in_place
from hyperslab.nn.ops.each.pointwise import POINTWISE
from hyperslab.nn.slab import Slab

_LEFT_OUT = (Tensor.requires_grad_,)


def _pointwise(function: Callable[..., Any], in_place: bool, *args: Any, **kwargs: Any) -> Any:
    operands = [*args, *kwargs.values()]
    tiles = _tiles_of(function, operands)
    plain = [each for each in operands if isinstance(each, Tensor)]
    if in_place and not isinstance(args[0], TileSlab):
        raise not_by_tiles(function, "it would write a tile into a plain tensor")
    if len(tiles) == 1 and not plain:
        tile = tiles[0]
        made = dispatch(function, *_mapped(_piece, args, kwargs))
        if made is NotImplemented:
            return made
        return tile if made is tile.piece else tile.with_local(_tensor(function, made))
    lead = args[0] if in_place else max(tiles, key=Slab.numel)
    whole = _whole(function, lead, tiles, plain)
    box = _common_box(lead, tiles)
    given, named = _mapped(lambda each: _localized(each, whole, box), args, kwargs)
    local = function(*given, **named)
    if in_place:
        return lead.become(local, box, tiles)
    return lead.made_into(_tensor(function, local), box, whole, tiles)


def _tiles_of(function: Callable[..., Any], operands: Sequence[Any]) -> list[TileSlab]:
    slabs = [each for each in operands if isinstance(each, Slab)]
    if any(not isinstance(slab, TileSlab) for slab in slabs):
        raise not_by_tiles(function, "it is given a Slab that is not the chain's input")
    return slabs  # type: ignore[return-value]


def _mapped(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(change, args)), {name: change(each) for name, each in kwargs.items()}


def _piece(operand: Any) -> Any:
    return operand.piece if isinstance(operand, TileSlab) else operand


def _local(operand: Any) -> Any:
    return operand.local if isinstance(operand, TileSlab) else operand


def _tensor(function: Callable[..., Any], local: Any) -> Tensor | Slab:
    if not isinstance(local, Tensor | Slab):
        raise not_by_tiles(function, "it gives no single tensor")
    return local


def _whole(
    function: Callable[..., Any], lead: TileSlab, tiles: list[TileSlab], plain: list[Tensor]
) -> Layout:
    """The layout of the result, which has the shape of the ``lead``."""
    shapes = (*(tuple(tile.shape) for tile in tiles), *(tuple(t.shape) for t in plain))
    whole = broadcast_layout(lead.whole, tuple(tile.whole for tile in tiles), shapes)
    if whole.shape != lead.whole.shape or any(tile.ndim != lead.ndim for tile in tiles):
        shown = " and ".join(map(str, shapes))
        raise not_by_tiles(function, f"its result has another shape than its largest tile: {shown}")
    return whole


def _common_box(lead: TileSlab, tiles: Sequence[TileSlab]) -> Box:
    """What all tiles hold of the dims that are not broadcast."""
    spans = list(lead.held.spans)
    for tile in tiles:
        for dim, span in enumerate(tile.held.spans):
            if tile.whole.shape[dim] == lead.whole.shape[dim]:
                spans[dim] &= span
    return Box(tuple(spans))


def _localized(operand: Any, whole: Layout, box: Box) -> Any:
    """The part of ``operand`` that broadcasts against ``box`` of a tensor under ``whole``."""
    if isinstance(operand, TileSlab):
        return operand.part(_broadcast_box(operand.whole.shape, whole, box)).local
    if isinstance(operand, Tensor):
        part = _broadcast_box(operand.shape, whole, box)
        return operand[part.slices_in(Box.whole(operand.shape))] if operand.ndim else operand
    return operand


def _broadcast_box(shape: Sequence[int], whole: Layout, box: Box) -> Box:
    behind = len(whole.shape) - len(shape)
    extents = zip(shape, whole.shape[behind:], box.spans[behind:], strict=True)
    return Box(tuple(span if n == extent else Span(0, n) for n, extent, span in extents))


for _function in POINTWISE.difference(_LEFT_OUT):
    tile_rule(_function)(partial(_pointwise, _function, writes_in_place(_function)))


def _converted(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Other tensors among the arguments give a dtype and a device, whatever their shape."""
    if not isinstance(x, TileSlab):
        raise not_by_tiles(function, "it converts a plain tensor")
    given, named = _mapped(_local, args, kwargs)
    local = function(x.local, *given, **named)
    return x if local is x.local else x.with_local(local)


for _function in (Tensor.to, Tensor.type_as):
    tile_rule(_function)(partial(_converted, _function))


@tile_rule(Tensor.contiguous)
def _contiguous(
    self: TileSlab, *, memory_format: torch.memory_format = torch.contiguous_format
) -> TileSlab:
    """The tile itself where the whole, of which it is a part, may well be contiguous already."""
    if memory_format is torch.contiguous_format:
        return self
    return self.with_local(self.local.contiguous(memory_format=memory_format))


@tile_rule(torch.prelu, F.prelu, Tensor.prelu)
def _prelu(input: TileSlab, weight: Tensor) -> TileSlab:
    return input.with_local(torch.prelu(input.local, weight))


@tile_rule(F.batch_norm)
def _batch_norm(input: TileSlab, *args: Any, **kwargs: Any) -> TileSlab:
    if OPS[F.batch_norm].parse((input, *args), kwargs).options["training"]:
        why = "its statistics are of the whole batch (in evaluation they are not)"
        raise not_by_tiles(F.batch_norm, why)
    return input.with_local(F.batch_norm(input.local, *args, **kwargs))


def _dropout(function: Function, *args: Any, **kwargs: Any) -> TileSlab:
    call = OPS[function].parse(args, kwargs)
    if call.options["training"] and call.options["p"] != 0:
        raise not_by_tiles(function, "it draws random numbers (in evaluation it does not)")
    return call.input  # type: ignore[no-any-return]


for _function in (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d):
    tile_rule(_function)(partial(_dropout, _function))
for _function in (F.alpha_dropout, torch.alpha_dropout, F.feature_alpha_dropout):
    tile_rule(_function)(partial(_dropout, _function))


@tile_rule(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> TileSlab:
    """Tensors joined along their channels."""
    dim = dim if axis is None else axis
    tiles = _tiles_of(torch.cat, tensors)
    first = max(tiles, key=lambda tile: len(tile.whole.split_dims))
    if dim not in (1, 1 - first.ndim):
        raise not_by_tiles(torch.cat, f"it joins along dim {dim}, and not along the channels")
    shapes = [tuple(each.shape) for each in tensors]
    if len({(shape[:1], shape[2:]) for shape in shapes}) > 1:
        raise LayoutError(f"cat along dim 1 of tensors that differ elsewhere: {shapes}")
    channels = sum(shape[1] for shape in shapes)
    whole = first.whole.with_dim(1, channels)
    box = _common_box(first, tiles).with_span(1, Span(0, channels))
    parts = [_localized(each, whole, box) for each in tensors]
    return first.made_into(torch.cat(parts, 1), box, whole, tiles)
