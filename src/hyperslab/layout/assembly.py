"""Arrays made of boxes of others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from hyperslab.layout.box import Box

Slices = tuple[slice, ...]
Shape = tuple[int, ...]
OWN = -1
"""In the place of a message's number: the rank's own array."""


class Piece(NamedTuple):
    """A box of one array, and where it goes."""

    source: int
    """The number of the message that brought the array, or ``OWN``."""
    of: Slices
    target: int
    to: Slices


@dataclass(frozen=True)
class Assembly:
    """Arrays of ``shapes``, made of pieces that do not overlap there."""

    shapes: tuple[Shape, ...]
    pieces: tuple[Piece, ...]
    received: tuple[Shape, ...] = ()
    """The shapes of what messages bring."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kept, because all that is planned for an assembly is looked up by it
        slices = chain.from_iterable((*p.of, *p.to) for p in self.pieces)
        return hash((self.shapes, self.received, tuple((s.start, s.stop) for s in slices)))

    @cached_property
    def is_full(self) -> bool:
        """Whether there are targets, and no array is empty."""
        return bool(self.shapes) and all(map(all, self.shapes + self.received))

    @cached_property
    def outside(self) -> tuple[tuple[int, Slices], ...]:
        """The boxes of each target that no piece fills."""
        return tuple(
            (number, box.slices_in(whole))
            for number, whole in enumerate(map(Box.whole, self.shapes))
            for box in self._rest(number, whole)
        )

    def _rest(self, number: int, whole: Box) -> list[Box]:
        rest = [whole] if whole else []
        for piece in self.pieces:
            if piece.target == number:
                filled = Box.of(*((s.start, s.stop) for s in piece.to))
                rest = [part for box in rest for part in box.minus(filled)]
        return rest


def cut_out(boxes: tuple[Slices, ...], shapes: tuple[Shape, ...]) -> Assembly:
    """``boxes`` of one array, of ``shapes``, each by itself."""
    pieces = (
        Piece(OWN, box, number, tuple(slice(0, size) for size in shape))
        for number, (box, shape) in enumerate(zip(boxes, shapes, strict=True))
    )
    return Assembly(shapes, tuple(pieces))
