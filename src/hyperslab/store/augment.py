"""Flips and turns of samples: every rank reads the pre-image of its own box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io import ArraySpec
from hyperslab.io.schedule import hash_words
from hyperslab.layout import Box, Span

KINDS = ("flip", "cube")


@dataclass(frozen=True)
class Symmetry:
    """Spatial dims in another order, some of them mirrored.

    Spatial dim ``i`` of the result is dim ``order[i]`` of the sample, mirrored if ``flips[i]``.
    """

    order: tuple[int, ...]
    flips: tuple[bool, ...]

    def source(self, box: Box, spec: ArraySpec) -> Box:
        """The box of the sample that becomes ``box`` of the result."""
        first = len(spec.shape) - len(self.order)
        spans = list(box.spans)
        for dim, (origin, flip) in enumerate(zip(self.order, self.flips, strict=True), first):
            start, stop = box.spans[dim]
            extent = spec.shape[dim]
            spans[first + origin] = (
                Span(extent - stop, extent - start) if flip else Span(start, stop)
            )
        return Box(tuple(spans))

    def view(self, out: NDArray[Any]) -> NDArray[Any]:
        """``out``, a box of the result, as the box of the sample that it is made of."""
        first = out.ndim - len(self.order)
        kept = [slice(None)] * first
        mirrored = out[(*kept, *(slice(None, None, -1 if flip else 1) for flip in self.flips))]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return mirrored.transpose(*range(first), *(first + dim for dim in back))


@dataclass(frozen=True)
class Augmentation:
    """Draws a symmetry for every visit of a sample: the same on all ranks and on every mesh.

    ``flip`` mirrors each spatial dim or not; ``cube`` also permutes those of equal extents.
    """

    kind: str
    extents: tuple[int, ...]
    """Of the spatial dims."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"augment must be one of {', '.join(KINDS)} or None, got {self.kind!r}"
            )

    def symmetry(self, seed: int, epoch: int, index: int) -> Symmetry:
        word = int(hash_words(1, seed, epoch, index)[0])
        num = len(self.extents)
        flips = tuple(bool(word >> bit & 1) for bit in range(num))
        return Symmetry(self._orders[(word >> num) % len(self._orders)], flips)

    @cached_property
    def _orders(self) -> Sequence[tuple[int, ...]]:
        dims = range(len(self.extents))
        if self.kind == "flip":
            return [tuple(dims)]
        return [
            order
            for order in permutations(dims)
            if all(self.extents[origin] == self.extents[dim] for dim, origin in enumerate(order))
        ]
