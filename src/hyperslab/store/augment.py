"""Flips and turns of samples: every rank reads the pre-image of its own box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io import ArraySpec, Dataset
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
        spans = list(box.spans)
        for dim in self.mirrored(len(spans)):
            start, stop = spans[dim]
            spans[dim] = Span(spec.shape[dim] - stop, spec.shape[dim] - start)
        return Box(tuple(spans[dim] for dim in self.back(len(spans))))

    def source_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the box of the sample that becomes a box of ``shape``."""
        return tuple(shape[dim] for dim in self.back(len(shape)))

    def view(self, out: NDArray[Any]) -> NDArray[Any]:
        """``out``, a box of the result, as the box of the sample that it is made of."""
        return np.flip(out, self.mirrored(out.ndim)).transpose(self.back(out.ndim))

    def mirrored(self, ndim: int) -> tuple[int, ...]:
        """Those of the result's ``ndim`` dims that are mirrored; the spatial ones come last."""
        first = ndim - len(self.flips)
        return tuple(dim for dim, flip in enumerate(self.flips, first) if flip)

    def forth(self, ndim: int) -> tuple[int, ...]:
        """The dims of the sample in the order of the result's."""
        first = ndim - len(self.order)
        return (*range(first), *(first + origin for origin in self.order))

    def back(self, ndim: int) -> tuple[int, ...]:
        """The dims of the result in the order of the sample's."""
        return tuple(sorted(range(ndim), key=self.forth(ndim).__getitem__))


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


def augmentation_of(kind: str | None, dataset: Dataset) -> Augmentation | None:
    """The one that a user asked for; raises where it would turn only a part of a sample."""
    if kind is None:
        return None
    named = zip(dataset.spec.axes.names, dataset.shape, strict=True)
    extents = tuple(extent for name, extent in named if name != "C")
    for spec in dataset.arrays.values():
        is_map = len(spec.shape) >= len(extents) > 1
        if is_map and not spec.is_cut and spec.name != dataset.stats:
            raise ConfigError(
                f"augment={kind!r} turns the sample, but not {spec.name!r} of {spec.shape}, which "
                f"looks like a map on another grid than the sample's {extents}: leave out augment, "
                "or give the map the sample's extents"
            )
    return Augmentation(kind, extents)
