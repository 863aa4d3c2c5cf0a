"""The ranks as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

AXES = ("sample", "channel", "depth", "height", "width")


@dataclass(frozen=True)
class Grid:
    """Ranks in row-major order over ``AXES``: ranks that differ in width are next to each other."""

    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[AXES.index(axis)]

    @cached_property
    def coords(self) -> tuple[Mapping[str, int], ...]:
        """Every rank's coords, by axis name."""
        grid = product(*(range(size) for size in self.sizes))
        return tuple(dict(zip(AXES, coords, strict=True)) for coords in grid)

    @property
    def long_axes(self) -> tuple[str, ...]:
        """The axes along which there is more than one rank."""
        return tuple(axis for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)

    def groups(self, axes: Collection[str]) -> Iterator[tuple[int, ...]]:
        """The sets of ranks whose coords differ only along ``axes``; they partition the grid."""
        kept = [axis for axis in self.long_axes if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(self.coords):
            members.setdefault(tuple(coords[axis] for axis in kept), []).append(rank)
        return map(tuple, members.values())

    def describe(self) -> str:
        """The long axes with their sizes, such as ``sample=2 x depth=4``."""
        return " x ".join(f"{axis}={self.size(axis)}" for axis in self.long_axes) or "one rank"
