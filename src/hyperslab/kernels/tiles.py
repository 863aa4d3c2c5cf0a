"""How one operator's work is cut where it is too large for one call, and computed tile by tile.

On a GPU convolutions fall off a cliff, or fail, where a call's input or output has 2^31 elements,
because cuDNN counts with 32 bits (pytorch issues 22496, 95024, 132300, 152816). Of larger tensors
pools give wrong gradients or read elsewhere (52822, 129785, pull request 188229), interpolations
too (141831, 193689), layer norm from 2^32 on (181555), and cuDNN's batch norm fails (51776).
Pointwise operators, sums and copies take any size.

Tiles of one operator are as few and as contiguous as they can be. Those of a chain of layers, in
which neighbours compute numbers twice, are chosen to compute few twice: ``hyperslab.layout.chain``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import Span, Window, cut_evenly, plan_piece_call

MAX_NUMEL = 2**31 - 1
"""Work that reads or makes more elements is cut."""

TILE_NUMEL = 5 * 2**27
"""Into calls that read and make no more: the first convolution of 4x512^3 into four."""


class Step(NamedTuple):
    """One call, along one dim."""

    own: Span
    """What it is made for."""
    reads: Span
    """The inputs that it is given."""
    makes: int
    """How many outputs it makes, at most."""
    drop: int = 0
    """How many of them come before its own."""

    @property
    def kept(self) -> slice:
        """Where its own outputs are among those that it makes."""
        return slice(self.drop, self.drop + self.own.size)


Tile = tuple[Step, ...]
"""One call: a step for every dim."""


class Axis(Hashable, Protocol):
    """How calls divide the work along one dim."""

    @property
    def extent(self) -> int:
        """What is cut into pieces."""

    def step(self, own: Span) -> Step:
        """The call that makes the piece ``own``."""


@dataclass(frozen=True, slots=True)
class Each:
    """A dim whose indices have nothing to do with each other."""

    extent: int

    def step(self, own: Span) -> Step:
        return Step(own, own, own.size)


@dataclass(frozen=True, slots=True)
class Whole:
    """A dim that every call reads and makes all of."""

    num_inputs: int
    extent: int

    def step(self, own: Span) -> Step:
        return Step(own, Span(0, self.num_inputs), self.extent)


@dataclass(frozen=True, slots=True)
class Sliding:
    """A dim along which each of ``extent`` outputs reads a window of the inputs."""

    window: Window
    num_inputs: int
    extent: int

    def step(self, own: Span) -> Step:
        if own.size == self.extent:
            return Step(own, Span(0, self.num_inputs), self.window.output_extent(self.num_inputs))
        call = plan_piece_call(self.window, own, self.num_inputs)
        makes = self.window.output_extent(call.reads.size) if call.at_end else own.size
        return Step(own, call.reads, makes, call.drop)

    def pads(self, own: Span) -> int:
        """What the call that makes ``own`` pads: nothing, unless it reads padding."""
        if own.size == self.extent:
            return self.window.padding
        call = plan_piece_call(self.window, own, self.num_inputs)
        return self.window.padding if call.at_end else 0


@lru_cache(maxsize=1024)
def pick_tiles(axes: tuple[Axis, ...], order: tuple[int, ...], limit: int) -> tuple[Tile, ...]:
    """The calls, none of which reads or makes more than ``limit`` elements.

    The first dim of ``order`` is cut into as few even pieces as that takes. Where single indices
    are too large still, each of them is cut along the next dim of ``order``, and so on; after the
    last the pieces are as small as they get.
    """
    counts = [1] * len(axes)
    for dim in order:
        extent = axes[dim].extent
        while (numel := _largest_call(axes, counts)) > limit and counts[dim] < extent:
            # Calls shrink no faster than their pieces do, so fewer pieces would not do.
            needed = -(-counts[dim] * numel // limit)
            counts[dim] = min(extent, max(counts[dim] + 1, needed))
    steps = [_steps(axis, count) for axis, count in zip(axes, counts, strict=True)]
    return tuple(product(*steps))


def _largest_call(axes: tuple[Axis, ...], counts: Sequence[int]) -> int:
    """The most elements that a call reads or makes."""
    steps = [_steps(axis, count) for axis, count in zip(axes, counts, strict=True)]
    return max(
        math.prod(max(step.reads.size for step in along) for along in steps),
        math.prod(max(step.makes for step in along) for along in steps),
    )


@lru_cache(maxsize=1024)
def _steps(axis: Axis, count: int) -> tuple[Step, ...]:
    return tuple(axis.step(own) for own in cut_evenly(axis.extent, count).spans)


def outermost_first(x: Tensor, *, without: Sequence[int] = ()) -> tuple[int, ...]:
    """The dims in which ``x`` is cut: samples, then the others as they lie in memory.

    Pieces along the outermost dim are whole blocks of memory, which no operator needs to copy.
    """
    strides = x.stride()
    others = [dim for dim in range(1, x.ndim) if dim not in without]
    return (0, *sorted(others, key=lambda dim: (-strides[dim], dim)))


def fill(tiles: Sequence[Tile], call: Callable[[Tile], Tensor]) -> Tensor:
    """The tensor that ``call`` computes tile by tile."""
    return fill_all(tiles, lambda tile: [call(tile)])[0]


def fill_all(
    tiles: Sequence[Tile],
    call: Callable[[Tile], Sequence[Tensor]],
    memory_format: torch.memory_format | None = None,
) -> list[Tensor]:
    """The tensors that ``call`` computes tile by tile, in ``memory_format`` or that of a tile."""
    outs: list[Tensor] = []
    shape = tuple(step.own.stop for step in tiles[-1])
    for tile in tiles:
        made = call(tile)
        for one in made if not outs else ():
            form = memory_format or memory_format_of(one)
            outs.append(torch.empty(shape, dtype=one.dtype, device=one.device, memory_format=form))
        for out, one in zip(outs, made, strict=True):
            out[own_of(tile)] = one[kept_of(tile)]
        del made, one  # before the next are made
    return outs


def reads_of(tile: Tile) -> tuple[slice, ...]:
    return tuple(slice(*step.reads) for step in tile)


def own_of(tile: Tile) -> tuple[slice, ...]:
    return tuple(slice(*step.own) for step in tile)


def kept_of(tile: Tile) -> tuple[slice, ...]:
    return tuple(step.kept for step in tile)


class Work(NamedTuple):
    """An operator of one tensor, and how it is divided."""

    call: Callable[[Tensor, Tile], Sequence[Tensor]]
    """Makes the outputs of a tile of its inputs. Only the first is differentiable."""
    axes: tuple[Axis, ...]
    order: tuple[int, ...]
    """The dims to cut, from the first one on."""
    memory_format: torch.memory_format | None = None
    """Of the outputs, if not that of a tile's."""

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return pick_tiles(self.axes, self.order, TILE_NUMEL)

    @property
    def whole(self) -> Tile:
        return pick_tiles(self.axes, (), TILE_NUMEL)[0]

    @property
    def apart(self) -> bool:
        """Whether every input is in one tile."""
        first, last = self.tiles[0], self.tiles[-1]
        cut = [axis for axis, a, b in zip(self.axes, first, last, strict=True) if a.own != b.own]
        return all(isinstance(axis, Each) for axis in cut)


def run_by_tiles(x: Tensor, work: Work) -> tuple[Tensor, ...]:
    """The outputs. The backward pass keeps ``x``, and computes tiles of the first output again."""
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
        ctx.work, ctx.autocast = work, autocast_as_now(x.device)
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


def autocast_as_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Contexts in which operands on ``device`` are cast as they are now.

    They have no cache: what it keeps of weights would outlive a tile and its graph.
    """
    name = device.type
    if not torch.amp.is_autocast_available(name):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
    return partial(torch.autocast, name, dtype, enabled, cache_enabled=False)


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
