"""What every sample is: one frozen table of files, rows and versions, made once and passed on."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.io.engine.files import Identity
from hyperslab.io.engine.threads import for_each
from hyperslab.io.measures import Statistics
from hyperslab.io.reader import ArrayReader, OpenFile, Opening, suffix_of
from hyperslab.io.schedule import Indices, split_samples
from hyperslab.io.spec import ArraySpec
from hyperslab.io.tiled import Tiling, open_tiled
from hyperslab.layout import Box, Span

Version = tuple[int, int]
"""The size of a file, and when it was last written to (in nanoseconds)."""


@dataclass(frozen=True)
class Look:
    """An array of a file as it was found there, in the file's order of dims."""

    shape: tuple[int, ...]
    dtype: str
    affine: tuple[tuple[float, ...], ...] | None = None
    """From indices along depth, height and width to millimetres, where the format has it."""
    spacing: tuple[float, ...] | None = None
    """The size of a cell along the same dims."""

    @classmethod
    def at(cls, reader: ArrayReader) -> Look:
        return cls(reader.shape, str(reader.dtype), reader.affine, reader.spacing)


@dataclass(frozen=True)
class SourceFile:
    """A file, and what is known of it without reading its data."""

    path: Path
    wild: tuple[str, ...] = ()
    """What the wildcards of the pattern that it was found by stand for."""
    version: Version | None = None
    """None if it was not there, or might not be looked at: that is told when it is read."""
    num_rows: int = 1
    """The samples in it."""
    looks: tuple[Look, ...] = ()
    """Its arrays, in the order of the source's, where the file itself was opened."""


@dataclass(frozen=True, eq=False)
class Source:
    """Files that are opened in the same way, and the arrays that each of them gives."""

    opening: Opening
    whole: tuple[ArraySpec, ...]
    """The arrays, by the names that the samples know them by, before they are tiled."""
    files: tuple[SourceFile, ...]
    tilings: tuple[Tiling, ...] = ()
    """How the files' samples are cut into those of the manifest, if they are."""
    staged: OpenFile | None = None
    """Reads copies in the files' place, tiled already."""

    @cached_property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """What each array of a sample is like."""
        return self._specs[-1]

    @cached_property
    def _specs(self) -> list[tuple[ArraySpec, ...]]:
        """The same before and after each of the tilings."""
        found = [self.whole]
        for tiling in self.tilings:
            found.append(tuple(tiling.spec(spec) for spec in found[-1]))
        return found

    @cached_property
    def num_tiles(self) -> int:
        """That each of the files' samples becomes."""
        return math.prod(tiling.num_tiles for tiling in self.tilings)

    def open(self, path: Path) -> list[ArrayReader]:
        """The readers of a file, one an array; tiles are stacked along the first dim."""
        return self.staged(path) if self.staged else self.open_original(path)

    def open_original(self, path: Path) -> list[ArrayReader]:
        readers = self.opening(path)
        for specs, tiling in zip(self._specs, self.tilings, strict=False):
            readers = open_tiled(readers, specs, tiling, path)
        return readers

    def tile(self, tiling: Tiling) -> Source:
        return replace(self, tilings=(*self.tilings, tiling))

    def origin(self, number: int) -> tuple[int, tuple[int, ...]]:
        """The sample in the file that tile ``number`` there is of, and where in it it begins."""
        origin: tuple[int, ...] = ()
        for tiling in reversed(self.tilings):
            number, tile = divmod(number, tiling.num_tiles)
            inner = origin or (0,) * len(tiling.extents)
            origin = tuple(a + b for a, b in zip(tiling.origin(tile), inner, strict=True))
        return number, origin


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where one array of one sample lies."""

    file: Path
    array: str
    """By its name there."""
    row: int | None
    """Which of the samples that are stacked in the file; None where it has one."""
    box: Box | None
    """What of it a tile is, channels first; None is all of it."""
    shape: tuple[int, ...]
    """Of the sample, channels first."""
    dtype: np.dtype[Any]
    version: Version | None
    affine: tuple[tuple[float, ...], ...] | None
    spacing: tuple[float, ...] | None


@dataclass(frozen=True)
class Sample:
    """One sample: what it is called, and where each of its arrays lies."""

    key: str
    arrays: Mapping[str, Where]


@dataclass(frozen=True, eq=False)
class Manifest:
    """Samples in files: which there are, where each of their arrays lies, in which order.

    The first source has the samples themselves, and with them the arrays in the same files; every
    other has arrays that lie beside them.
    """

    sources: tuple[Source, ...]
    places: Indices
    """(samples, sources, 2): the file, and the number there; tiles are counted like samples."""
    stats: str | None = None
    """The array with each sample's own statistics."""
    statistics: Statistics | None = field(default=None, repr=False)
    """Of the whole set, if they were taken."""
    patterns: tuple[str, ...] = ()
    """What the files of the first source were found by, where all of them are there."""

    @classmethod
    def of_files(cls, source: Source, **more: Any) -> Manifest:
        """All samples of all files of ``source``, in their order."""
        counts = [file.num_rows * source.num_tiles for file in source.files]
        numbers = [np.arange(count) for count in counts]
        rows = np.concatenate([*numbers, np.empty(0, np.int64)])
        files = np.repeat(np.arange(len(counts)), counts)
        return cls((source,), np.stack([files, rows], 1)[:, None].astype(np.int64), **more)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index}: the manifest has {len(self)} samples")
        return Sample(self.key(index), {name: self.where(index, name) for name in self.arrays})

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """What each array of a sample is like, by name; the sample itself comes first."""
        return {spec.name: spec for source in self.sources for spec in source.arrays}

    @cached_property
    def columns(self) -> dict[str, tuple[int, int]]:
        """The source that an array is of, and which of the source's arrays it is."""
        return {
            spec.name: (number, place)
            for number, source in enumerate(self.sources)
            for place, spec in enumerate(source.arrays)
        }

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Of the samples themselves."""
        return self.sources[0].files

    def place(self, index: int, source: int = 0) -> tuple[int, int]:
        """The file of a source that a sample lies in, and its number there."""
        return self.places.item(index, source, 0), self.places.item(index, source, 1)

    def where(self, index: int, array: str) -> Where:
        number, position = self.columns[array]
        source, spec = self.sources[number], self.arrays[array]
        file, row = self.place(index, number)
        found = source.files[file]
        row, origin = source.origin(row)
        look = found.looks[position] if found.looks else None
        shape, dtype = spec.shape, spec.dtype
        if look is not None and not source.tilings:
            shape, dtype = spec.axes.sample_shape(look.shape), np.dtype(look.dtype)
        return Where(
            file=found.path,
            array=source.opening.names[position],
            row=row if source.whole[position].axes.stacked else None,
            box=_box_at(origin, spec) if origin and spec.is_cut else None,
            shape=shape,
            dtype=dtype,
            version=found.version,
            affine=look.affine if look else None,
            spacing=look.spacing if look else None,
        )

    def key(self, index: int) -> str:
        """What a sample is called: by its file, and by its number where that has several."""
        source = self.sources[0]
        file, number = self.place(index)
        row, _ = source.origin(number)
        name = self._names[file]
        if source.whole[0].axes.stacked:
            name += f"[{row}]"
        return f"{name}#{number % source.num_tiles}" if source.tilings else name

    @cached_property
    def _names(self) -> list[str]:
        """The files below the folder that has all of them, without suffix if that is enough."""
        paths = [file.path for file in self.files]
        common = Path(os.path.commonpath([path.parent for path in paths]))
        names = [path.relative_to(common).as_posix() for path in paths]
        suffixes = [suffix_of(path) for path in paths]
        short = [
            name[: len(name) - len(suffix)] for name, suffix in zip(names, suffixes, strict=True)
        ]
        return names if len(set(short)) < len(short) else short

    def digest(self) -> int:
        """The same for the same samples in the same order, wherever their folder lies."""
        names = [file.path.name for file in self.files]
        places = self.places[:, 0].tolist()
        told = "\n".join(f"{names[file]} {number}" for file, number in places)
        return zlib.crc32(told.encode(errors="surrogateescape"))

    # From one manifest to another

    def take(self, indices: Sequence[int] | Indices) -> Manifest:
        """The samples ``indices`` alone, in that order."""
        if isinstance(indices, int | float):
            raise ConfigError(f"take wants a list of samples, got {indices!r}")
        chosen = split_samples(len(self), {"taken": indices})["taken"]
        return replace(self, places=self.places[chosen], patterns=())

    def split(
        self, parts: Mapping[str, float | Sequence[int] | Indices], seed: int = 0
    ) -> dict[str, Manifest]:
        """Parts of the samples by name: lists of samples, or fractions of the rest."""
        chosen = split_samples(len(self), parts, seed)
        return {name: self.take(indices) for name, indices in chosen.items()}

    def tile(self, extents: int | Sequence[int]) -> Manifest:
        """Every sample cut into tiles, each of them a sample of its own."""
        tiling = Tiling.of(self.sources[0].arrays[0], extents)
        num = tiling.num_tiles
        places = self.places.repeat(num, axis=0)
        places[..., 1] *= num
        places[..., 1] += np.tile(np.arange(num), len(self))[:, None]
        sources = tuple(source.tile(tiling) for source in self.sources)
        return replace(self, sources=sources, places=places, patterns=())

    def join(self, others: Mapping[str, Manifest], rows: Mapping[str, Indices]) -> Manifest:
        """The same samples, each with sample ``rows[name][i]`` of every other beside it.

        The other's own array takes the name that it is given by.
        """
        sources, places = list(self.sources), [self.places]
        for name, other in others.items():
            (source,) = other.sources
            (spec,) = source.whole
            sources.append(replace(source, whole=(replace(spec, name=name),)))
            places.append(other.places[rows[name]])
        return replace(self, sources=tuple(sources), places=np.concatenate(places, axis=1))

    def stage(self, openers: Sequence[OpenFile | None]) -> Manifest:
        """The same samples, read by an opener for each of the sources that has one."""
        sources = [
            replace(source, staged=opener)
            for source, opener in zip(self.sources, openers, strict=True)
        ]
        return replace(self, sources=tuple(sources))

    def all_files(self) -> list[SourceFile]:
        """Of all sources."""
        return list(chain.from_iterable(source.files for source in self.sources))


def look_at_files(files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """The files with their versions, by one ``stat`` each."""
    pairs = zip(files, versions_of([file.path for file in files]), strict=True)
    return tuple([replace(file, version=version) for file, version in pairs])


def versions_of(paths: Sequence[Path]) -> list[Version | None]:
    """What files are like now; None for those that are not there."""
    found: list[Version | None] = [None] * len(paths)

    def look(number: int) -> None:
        found[number] = version_of(paths[number])

    for_each(look, range(len(paths)))
    return found


def version_of(path: Path) -> Version | None:
    try:
        return Identity.of(path.stat()).version
    except OSError:
        return None


def _box_at(origin: Sequence[int], spec: ArraySpec) -> Box:
    starts = (*(0,) * (len(spec.shape) - len(origin)), *origin)
    return Box(
        tuple(Span(start, start + size) for start, size in zip(starts, spec.shape, strict=True))
    )
