"""Any operator of one tensor, tile by tile; the backward pass needs the tensor alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.kernels import tiles
from hyperslab.kernels.tiles import (
    Axis,
    Each,
    Tile,
    fill_all,
    kept_of,
    own_of,
    pick_tiles,
    reads_of,
)


class Work(NamedTuple):
    """What is computed, and how that is divided."""

    call: Callable[[Tensor, Tile], Sequence[Tensor]]
    """Makes the outputs of a tile of its inputs. Only the first is differentiable."""
    axes: tuple[Axis, ...]
    order: tuple[int, ...]
    """The dims to cut, from the first one on."""
    memory_format: torch.memory_format | None = None
    """Of the outputs, if not that of a tile's."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return pick_tiles(self.axes, self.order, tiles.TILE_NUMEL)

    @property
    def whole(self) -> Tile:
        return pick_tiles(self.axes, (), tiles.TILE_NUMEL)[0]

    @property
    def apart(self) -> bool:
        """Whether every input is in one tile."""
        first, last = self.tiles[0], self.tiles[-1]
        cut = [axis for axis, a, b in zip(self.axes, first, last, strict=True) if a.own != b.own]
        return all(isinstance(axis, Each) for axis in cut)


def run_by_tiles(x: Tensor, work: Work) -> tuple[Tensor, ...]:
    """The outputs. The backward pass computes tiles of the first one again."""
    out: tuple[Tensor, ...] = _ByTiles.apply(x, work)  # type: ignore[no-untyped-call]
    return out


class _ByTiles(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> tuple[Tensor, ...]:
        outs = fill_all(
            work.tiles, lambda tile: work.call(x[reads_of(tile)], tile), work.memory_format
        )
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(*outs[1:])
        ctx.set_materialize_grads(False)
        ctx.work, ctx.autocast = work, _autocast_as_now(x)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        if grad is None:
            return None, None
        with ctx.autocast():
            if torch.is_grad_enabled():  # for a gradient of this gradient
                out = ctx.work.call(x, ctx.work.whole)[0]
                return *torch.autograd.grad(out, x, grad, create_graph=True), None
            return _input_grad(x, grad, ctx.work), None


def _autocast_as_now(x: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)


def _input_grad(x: Tensor, grad: Tensor, work: Work) -> Tensor:
    out = torch.empty_like(x) if work.apart else torch.zeros_like(x)
    put = Tensor.copy_ if work.apart else Tensor.add_
    for tile in work.tiles:
        put(out[reads_of(tile)], _tile_grad(x, grad, work, tile))
    return out


def _tile_grad(x: Tensor, grad: Tensor, work: Work, tile: Tile) -> Tensor:
    """The gradient of a tile's inputs."""
    part = x[reads_of(tile)].detach().requires_grad_()
    with torch.enable_grad():
        out = work.call(part, tile)[0][kept_of(tile)]
    return torch.autograd.grad(out, part, grad[own_of(tile)])[0]
