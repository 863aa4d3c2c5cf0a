"""Samples cut into tiles, each a sample of its own: the same files, boxes shifted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.io.spec import AXIS_OF, ArraySpec, check_like, shown_shape
from hyperslab.layout import Box, Span


@dataclass(frozen=True)
class Tiling:
    """Samples of one shape, cut evenly along their spatial dims."""

    sample: ArraySpec
    """As it is before it is cut."""
    extents: tuple[int, ...]
    """Of a tile, along depth, height and width, as far as the sample has them."""

    @classmethod
    def of(cls, sample: ArraySpec, extents: int | Sequence[int]) -> Tiling:
        """Tiles of ``extents``, one length for all spatial dims or one each, if they fit."""
        letters = sample.axes.names.removeprefix("C")
        tiling = cls(sample, _lengths(extents, letters, sample))
        tiling._check_divides(letters)
        return tiling

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Of tiles along each spatial dim."""
        return tuple(n // m for n, m in zip(self._space, self.extents, strict=True))

    @cached_property
    def num_tiles(self) -> int:
        """In a sample."""
        return math.prod(self.counts)

    def spec(self, whole: ArraySpec) -> ArraySpec:
        """What ``whole``, an array of the samples, is like as one of the tiles.

        What is not cut is there again for every tile.
        """
        axes = replace(whole.axes, stacked=True)
        if not whole.is_cut:
            return replace(whole, axes=axes)
        channels = whole.shape[: len(whole.shape) - len(self.extents)]
        return replace(whole, axes=axes, shape=(*channels, *self.extents))

    def origin(self, tile: int) -> tuple[int, ...]:
        """Where a tile begins in its sample; tiles are counted in row-major order."""
        places = np.unravel_index(tile, self.counts)
        return tuple(int(i) * extent for i, extent in zip(places, self.extents, strict=True))

    @property
    def _space(self) -> tuple[int, ...]:
        return self.sample.shape["C" in self.sample.axes.letters :]

    def _check_divides(self, letters: str) -> None:
        for letter, whole, extent in zip(letters, self._space, self.extents, strict=True):
            if not 0 < extent <= whole or whole % extent:
                fitting = [n for n in range(1, whole + 1) if whole % n == 0]
                nearest = sorted(sorted(fitting, key=lambda n: abs(n - extent))[:3])
                raise ConfigError(
                    f"tiles of {shown_shape(self.extents)} do not fill samples of "
                    f"{shown_shape(self._space)}: their {AXIS_OF[letter]} of {extent} does not "
                    f"divide {whole}, as {' or '.join(map(str, nearest))} would"
                )


class TiledArray(ArrayReader):
    """An array of a file as tiles, which lie stacked along its first dim."""

    def __init__(self, whole: ArrayReader, spec: ArraySpec, tiling: Tiling) -> None:
        self.whole = whole
        self._spec, self._tiling = spec, tiling
        self._tile = tiling.spec(spec)
        num = spec.axes.num_samples(whole.shape) * tiling.num_tiles
        self.shape = (num, *self._tile.axes.in_file_order(self._tile.shape))
        self.dtype, self.sources = whole.dtype, whole.sources
        self.spacing = whole.spacing

    def read(self, box: Box, out: NDArray[Any]) -> None:
        for row, part in enumerate(self.parts(box)):
            self.whole.read(part, out[row : row + 1] if self._spec.axes.stacked else out[row, ...])

    def parts(self, box: Box) -> Iterator[Box]:
        """The boxes of the whole array, one a tile, that ``box`` is made of."""
        for number in range(*box.spans[0]):
            sample, tile = divmod(number, self._tiling.num_tiles)
            pairs = zip(box.spans[1:], self._origin(tile), strict=True)
            spans = tuple(Span(start + first, stop + first) for (start, stop), first in pairs)
            one = (Span(sample, sample + 1),) if self._spec.axes.stacked else ()
            yield Box((*one, *spans))

    def storage(self) -> Storage:
        """As of the file, with chunks cut to a tile."""
        storage = self.whole.storage()
        if storage.chunks is None:
            return storage
        one = storage.chunks[self._spec.axes.stacked :]
        cut = (max(1, min(pair)) for pair in zip(one, self.shape[1:], strict=True))
        return replace(storage, chunks=(1, *cut))

    def _origin(self, tile: int) -> tuple[int, ...]:
        """Where a tile begins in its sample, in the file's order of dims."""
        zeros = (0,) * len(self._spec.shape)
        if not self._spec.is_cut:
            return zeros
        origin = self._tiling.origin(tile)
        return self._spec.axes.in_file_order((*zeros[len(origin) :], *origin))


def open_tiled(
    readers: Sequence[ArrayReader], specs: Sequence[ArraySpec], tiling: Tiling, path: Path
) -> list[ArrayReader]:
    """The arrays of a file, whose samples are like ``specs``, as arrays of tiles."""
    found: list[ArrayReader] = []
    for spec, reader in zip(specs, readers, strict=True):
        check_like(spec, reader, path)
        found.append(TiledArray(reader, spec, tiling))
    return found


def untiled(reader: ArrayReader) -> ArrayReader:
    """The reader of the array as it is in its file."""
    while isinstance(reader, TiledArray):
        reader = reader.whole
    return reader


def _lengths(extents: int | Sequence[int], letters: str, sample: ArraySpec) -> tuple[int, ...]:
    try:
        given = list(extents) if isinstance(extents, Iterable) else [extents] * len(letters)
        lengths = tuple(map(index, given))
    except TypeError:
        raise ConfigError(
            f"the extents of tiles are whole numbers, such as 64 or (64, 64), got {extents!r}"
        ) from None
    if len(lengths) != len(letters) or not letters:
        raise ConfigError(
            f"tiles of {shown_shape(lengths)} were asked for, but samples of "
            f"{shown_shape(sample.shape)} have {len(letters)} spatial dims ({letters or 'none'}): "
            "give one length for all of them, or one each"
        )
    return lengths
