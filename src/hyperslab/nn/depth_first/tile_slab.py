"""A tile on its way through a chain of layers that are computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Never

import torch
from torch import Tensor

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.layout import AXES, AnyWindow, Box, Grid, Layout, Step
from hyperslab.nn.op import name_of
from hyperslab.nn.slab import Slab

Rule = Callable[..., Any]

TILE_RULES: dict[Callable[..., Any], Rule] = {}
"""What computes a torch function of tiles; the others cannot run on them."""


class NotHeldError(Exception):
    """A chain reads what it did not read in the survey."""


class Tape:
    """Which tensor of a chain was made of which, and what is wanted of each.

    They are numbered in the order in which they are made, the chain's input first.
    """

    def __init__(self, source: Layout, wanted: Sequence[Box | None] | None = None) -> None:
        self.steps = [Step(source.shape)]
        self._wanted = wanted

    def note(self, step: Step) -> int:
        """The number of a tensor."""
        if not step.windows and len(step.parents) == 1:  # no other indices: as good as the parent
            parent = step.parents[0]
            if self.steps[parent].shape == step.shape:
                return parent
        self.steps.append(step)
        return len(self.steps) - 1

    def wanted_next(self, shape: Sequence[int]) -> Box:
        """What is wanted of the next tensor, which has ``shape``: all of it, if nothing is said."""
        number = len(self.steps)
        known = self._wanted is not None and number < len(self._wanted)
        box = self._wanted[number] if known else None  # type: ignore[index]
        return box or Box.whole(shape)


class TileSlab(Slab):
    """A box of a layer's tensor. To torch functions it is the whole tensor, as every Slab is.

    A function computes what is wanted of its result, as its tape tells, or more. On the tape it
    notes which tensor it makes of which. The box may lie anywhere, so there is no ``layout`` to
    ask for what other ranks hold; ``whole`` is that which the tensor would have layer by layer.
    """

    piece: Slab
    """The box as a tensor of its own, by whose rules the kernels of a single rank serve here too.
    """
    held: Box
    whole: Layout
    tape: Tape
    step: int
    """The tensor's number on the tape."""

    def __init__(
        self, local: Tensor | Slab, held: Box, whole: Layout, mesh: Mesh, tape: Tape, step: int = 0
    ) -> None:
        piece = local if isinstance(local, Slab) else single_rank_slab(local)
        self.__dict__.update(piece=piece, held=held, whole=whole, mesh=mesh, tape=tape, step=step)

    @property
    def local(self) -> Tensor:
        return self.piece.local

    @staticmethod
    def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = TILE_RULES.get(function)
        if rule is None or kwargs.get("out") is not None:
            raise not_by_tiles(function)
        return rule(*args, **kwargs)

    @property
    def layout(self) -> Never:
        raise UnsupportedOp(
            "a tile of a depth-first chain is no Slab with a layout: gather, shard and rules of "
            "hyperslab.register cannot be used within it; name modules without them in depth_first"
        )

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self.whole.shape)

    @property
    def box(self) -> Box:
        return self.held

    @property
    def ndim(self) -> int:
        return len(self.whole.shape)

    def __len__(self) -> int:
        return self.whole.shape[0]

    def with_local(self, local: Tensor | Slab, layout: Layout | None = None) -> TileSlab:
        """The same box of a tensor made of this one, element by element."""
        if layout is not None:
            return self.layout
        return TileSlab(local, self.held, self.whole, self.mesh, self.tape, self.step)

    def made_into(
        self,
        local: Tensor | Slab,
        held: Box,
        whole: Layout,
        parents: Sequence[TileSlab] = (),
        windows: Sequence[AnyWindow | None] = (),
    ) -> TileSlab:
        """A tile of the tensor that is made of ``parents``, by default of this tile's."""
        step = self.tape.note(Step(whole.shape, _numbers(parents or [self]), tuple(windows)))
        return TileSlab(local, held, whole, self.mesh, self.tape, step)

    def become(self, local: Tensor, held: Box, parents: Sequence[TileSlab]) -> TileSlab:
        """This tile, in place: whoever holds it sees what was made of it and the ``parents``."""
        step = self.tape.note(Step(self.whole.shape, _numbers(parents)))
        self.__dict__.update(piece=single_rank_slab(local), held=held, step=step)
        return self

    def part(self, box: Box) -> Slab:
        """The elements in ``box``, as a tensor of their own."""
        if not self.held.contains(box):
            raise NotHeldError
        return (
            self.piece
            if box == self.held
            else single_rank_slab(self.local[box.slices_in(self.held)])
        )

    def __repr__(self) -> str:
        held = "x".join(map(str, self.held.shape))
        return f"TileSlab({held} of {self.whole.describe()}, {self.dtype}, {self.device})"


def single_rank_slab(x: Tensor) -> Slab:
    """``x`` on a rank that knows of no others."""
    return Slab(x, Layout.unsplit(x.shape), _single_rank_mesh(x.device))


@lru_cache
def _single_rank_mesh(device: torch.device) -> Mesh:
    return Mesh(Grid((1,) * len(AXES)), 0, device, None, timedelta())


def _numbers(tiles: Sequence[TileSlab]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tile.step for tile in tiles))


def tile_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Makes the decorated rule what computes ``functions`` of tiles."""

    def keep(rule: Rule) -> Rule:
        TILE_RULES.update(dict.fromkeys(functions, rule))
        return rule

    return keep


def not_by_tiles(function: Callable[..., Any], why: str = "") -> UnsupportedOp:
    """The error to raise where ``function`` cannot be computed tile by tile."""
    return UnsupportedOp(
        f"{name_of(function)} cannot be computed in the tiles of a depth-first chain: "
        f"{why or 'it has no rule there'}. Name modules without it in depth_first"
    )
