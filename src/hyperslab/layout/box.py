"""Spans of indices along one dim, and boxes with one span per dim: the hyperslab itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Span(NamedTuple):
    """The indices ``start <= i < stop`` along one dim, in global coordinates.

    >>> Span(2, 9) & Span(5, 12)
    Span(start=5, stop=9)
    >>> (Span(0, 4) & Span(6, 8)).size
    0
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def contains(self, other: Span) -> bool:
        return not other.size or (self.start <= other.start and other.stop <= self.stop)

    def slice_from(self, origin: int) -> slice:
        """This span as a slice of an array whose first index is ``origin``."""
        first = self.start - origin
        return slice(first, first + self.size)


@dataclass(frozen=True)
class Box:
    """A box of a global array: one span per dim, in global coordinates."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, *bounds: tuple[int, int]) -> Box:
        """The box with the given ``(start, stop)`` along each dim.

        >>> Box.of((0, 4), (2, 5)).shape
        (4, 3)
        """
        return cls(tuple(Span(*pair) for pair in bounds))

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        return cls(tuple(Span(0, extent) for extent in shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple([max(0, stop - start) for start, stop in self.spans])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __bool__(self) -> bool:
        """Whether the box holds any index at all."""
        return 0 not in self.shape

    def __and__(self, other: Box) -> Box:
        pairs = zip(self.spans, other.spans, strict=True)
        return Box(tuple(mine & theirs for mine, theirs in pairs))

    def contains(self, other: Box) -> bool:
        pairs = zip(self.spans, other.spans, strict=True)
        return not other or all(mine.contains(theirs) for mine, theirs in pairs)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in an array that holds ``outer``."""
        pairs = zip(self.spans, outer.spans, strict=True)
        return tuple(span.slice_from(around.start) for span, around in pairs)

    def with_span(self, dim: int, span: Span) -> Box:
        return Box((*self.spans[:dim], span, *self.spans[dim + 1 :]))

    def minus(self, inner: Box) -> tuple[Box, ...]:
        """Disjoint boxes that cover what is in this box and not in ``inner``.

        At most two boxes a dim: the faces below and above ``inner``.

        >>> [box.shape for box in Box.of((0, 4), (0, 4)).minus(Box.of((1, 3), (0, 3)))]
        [(1, 4), (1, 4), (2, 1)]
        """
        if not self & inner:
            return (self,) if self else ()
        faces, rest = [], self
        for dim, (mine, hole) in enumerate(zip(self.spans, (self & inner).spans, strict=True)):
            below = rest.with_span(dim, Span(mine.start, hole.start))
            above = rest.with_span(dim, Span(hole.stop, mine.stop))
            faces += [face for face in (below, above) if face]
            rest = rest.with_span(dim, hole)
        return tuple(faces)
