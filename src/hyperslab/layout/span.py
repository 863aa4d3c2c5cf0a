"""A run of consecutive indices."""

from __future__ import annotations

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
