"""Where one dim is cut into the pieces of the ranks along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hyperslab.errors import LayoutError
from hyperslab.layout.box import Span


@dataclass(frozen=True)
class Cuts:
    """The bounds of consecutive pieces: coord ``i`` holds ``bounds[i]:bounds[i + 1]``.

    Pieces may be uneven and may be empty.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        falls = any(b < a for a, b in pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or falls:
            raise LayoutError(
                f"cuts must start at 0 and not decrease, got {list(self.bounds)}: "
                "give the first index of every piece and the extent, such as [0, 9, 16]"
            )

    @property
    def num(self) -> int:
        return len(self.bounds) - 1

    @property
    def extent(self) -> int:
        return self.bounds[-1]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(a, b) for a, b in pairwise(self.bounds))

    def scaled(self, factor: int) -> Cuts:
        """The same pieces when every index stands for ``factor`` indices."""
        return Cuts(tuple(bound * factor for bound in self.bounds))


def cut_evenly(extent: int, num: int) -> Cuts:
    """``num`` pieces of nearly equal length that cover ``0:extent``, longer ones first.

    >>> cut_evenly(7, 3).bounds
    (0, 3, 5, 7)
    """
    length, longer = divmod(extent, num)
    return Cuts(tuple(i * length + min(i, longer) for i in range(num + 1)))


def cut_in_chunks(extent: int, num: int) -> Cuts:
    """As ``torch.chunk`` and ``DTensor`` cut: all pieces equally long but the last ones.

    >>> cut_in_chunks(10, 4).bounds, cut_in_chunks(4, 3).bounds
    ((0, 3, 6, 9, 10), (0, 2, 4, 4))
    """
    length = -(-extent // num)
    return Cuts(tuple(min(i * length, extent) for i in range(num + 1)))


def cut_at(bounds: Sequence[int], extent: int, num: int, where: str) -> Cuts:
    """The cuts that a user asked for, checked against the dim and axis they are meant for."""
    cuts = Cuts(tuple(int(bound) for bound in bounds))
    if cuts.extent != extent or cuts.num != num:
        raise LayoutError(
            f"cuts {list(bounds)} along {where} make {cuts.num} pieces of an extent of "
            f"{cuts.extent}, but the mesh has {where}={num} and the tensor an extent of {extent} "
            "there"
        )
    return cuts
