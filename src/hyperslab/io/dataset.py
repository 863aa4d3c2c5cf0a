"""Samples in files, and any box of any of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine.files import Identity
from hyperslab.io.engine.threads import for_each
from hyperslab.io.pairing import NamedFile, listed, pair_files
from hyperslab.io.reader import ArrayReader, OpenFile
from hyperslab.io.schedule import Indices, split_samples
from hyperslab.io.spec import (
    ArraySpec,
    BoxLike,
    around,
    check_like,
    check_on_grid,
    checked_box,
    checked_out,
    has_same_space,
    is_like,
    sample_layout,
    shown_shape,
)
from hyperslab.io.tiled import Tiling, open_tiled
from hyperslab.layout import Box, Grid, Layout


class Dataset:
    """Samples of one shape, in any number of files; made by ``hyperslab.open``."""

    def __init__(
        self,
        files: Sequence[NamedFile],
        counts: Sequence[int],
        arrays: Sequence[ArraySpec],
        open_file: OpenFile,
        options: Mapping[str, Any],
        stats: str | None = None,
    ) -> None:
        self.paths = tuple(file.path for file in files)
        self._files = tuple(files)
        self.options = dict(options)
        """What it was opened with, to open files like these again."""
        self.arrays = {spec.name: spec for spec in arrays}
        """By name; the sample itself comes first."""
        self.stats = stats
        """The array with each sample's statistics: a row a channel, of min, max, mean and std."""
        self.spans_files = False
        """Whether a sample's arrays lie in several files."""
        self.tilings: tuple[Tiling, ...] = ()
        """How the files' samples were cut into those of this dataset, if they were."""
        self.layouts: Mapping[str, Layout] = {}
        """How ranks have cut one sample of the arrays that they hold already, by name."""
        self.owned_in: int | None = None
        """The epoch in whose order they hold them; None where samples are yet to be read."""
        """The epoch in whose order they hold them; None where samples are yet to be read."""
        self._chosen: Indices | None = None
        self._ends = list(accumulate(counts))
        self.open_file = open_file
        """The readers of a file like these, one an array."""
        self._readers: dict[int, list[ArrayReader]] = {}
        self._versions: dict[int, tuple[int, int] | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without readers, which another process makes for itself."""
        return {**self.__dict__, "_readers": {}}

    def __len__(self) -> int:
        return self._ends[-1] if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        what = f"{'tiles' if self.tilings else 'samples'} of {shown_shape(self.shape)} {self.dtype}"
        return f"Dataset({len(self)} {what} in {len(self.paths)} files)"

    @property
    def spec(self) -> ArraySpec:
        """Of the sample itself."""
        return next(iter(self.arrays.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample, channels first."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype

    @property
    def counts(self) -> tuple[int, ...]:
        """How many samples each of the files has."""
        return tuple(end - start for start, end in pairwise((0, *self._ends)))

    def take(self, indices: Sequence[int] | Indices) -> Dataset:
        """The samples ``indices`` alone, in that order, from the same files."""
        if isinstance(indices, int | float):
            raise ConfigError(f"take wants a list of samples, got {indices!r}")
        chosen = split_samples(len(self), {"taken": indices})["taken"]
        part = copy(self)
        part._chosen = chosen if self._chosen is None else self._chosen[chosen]
        return part

    def tiled(self, extents: int | Sequence[int]) -> Dataset:
        """The same data with every sample cut into tiles, each of them a sample of its own.

        ``extents`` are the lengths of a tile along depth, height and width, or one for all; they
        divide the sample's, and channels stay whole. Of ``n`` tiles a sample, in row-major order,
        sample ``i`` is tile ``i % n`` of what was sample ``i // n``. Label maps are cut alike, all
        other arrays are there again for every tile.
        """
        tiling = Tiling.of(self.spec, extents)
        num = tiling.num_tiles
        specs = tuple(self.arrays.values())
        other = self.reopened(partial(open_tiled, self.open_file, specs, tiling))
        other._versions = self._versions
        other.tilings = (*self.tilings, tiling)
        other.arrays = {name: tiling.spec(spec) for name, spec in self.arrays.items()}
        other._ends = [end * num for end in self._ends]
        if self._chosen is not None:
            other._chosen = (self._chosen[:, None] * num + np.arange(num)).ravel()
        return other

    def beside(self, *, by: str | None = None, **others: Dataset) -> Dataset:
        r"""The same samples, with those of other files beside them, file by file.

        ``hs.open("images/*.nii").beside(label=hs.open("labels/*.nii"))`` has the label maps under
        the name ``label``, and cuts them like the images where their spatial extents are the same.

        Files go together by name: without folder and suffix they are the same, or what stands for
        the wildcards of their patterns is, as of ``images/img*.nii`` and ``labels/seg*.nii``.
        ``by`` is a regular expression whose groups are compared instead, such as ``r"(\d+)"``, or
        ``order``: the first file with the first. It is an error if one has no partner, or if label
        maps have other extents than the samples, or extents that do not divide theirs.
        """
        if self._chosen is not None or any(o._chosen is not None for o in others.values()):
            raise ConfigError("put datasets beside each other first, then take or split samples")
        if len(set(self.paths)) < len(self.paths):
            raise ConfigError("a file is named twice, so it cannot be said what lies beside it")
        partners: dict[Path, list[Path]] = {path: [] for path in self.paths}
        arrays = dict(self.arrays)
        for name, other in others.items():
            if name in self.arrays:
                raise ConfigError(f"there is an array {name!r} already: give the other a new name")
            found = pair_files(self._files, other._files, name, by)
            self._check_counts(name, other, found)
            check_on_grid(name, other.spec, self.spec, other.paths[0])
            other._check_files_alike(name)
            for path, partner in zip(self.paths, found, strict=True):
                partners[path].append(partner)
            is_cut = has_same_space(other.spec.axes.names, other.spec.shape, self.spec)
            arrays[name] = replace(other.spec, name=name, is_cut=is_cut)
        openers = [self.open_file, *(other.open_file for other in others.values())]
        joined = self.reopened(partial(_open_joined, openers, partners))
        joined.arrays = arrays
        joined.spans_files = True
        return joined

    def _check_counts(self, name: str, other: Dataset, partners: Sequence[Path]) -> None:
        """Raises unless each of the files has as many samples as its partner."""
        counts = dict(zip(other.paths, other.counts, strict=True))
        rows = zip(self.paths, self.counts, partners, strict=True)
        odd = [
            f"{path.name} has {count}, {partner.name} {counts[partner]}"
            for path, count, partner in rows
            if count != counts[partner]
        ]
        if odd:
            raise ConfigError(
                f"{name!r} cannot be put beside {list(self.arrays)}, for as many samples in each "
                f"file were expected: {listed(odd)}"
            )

    def _check_files_alike(self, name: str) -> None:
        """Raises if files have other shapes than the first.

        Those that cannot be opened are told when they are read.
        """
        odd: dict[int, str] = {}

        def look(file: int) -> None:
            path, spec = self.paths[file], self.spec
            try:
                reader = self.open_file(path)[0]
            except FormatError:
                return
            if not is_like(spec, reader):
                odd[file] = f"{path.parent.name}/{path.name} has {reader.dtype} {reader.shape}"

        for_each(look, range(len(self.paths)))
        if odd:
            raise FormatError(
                f"{len(odd)} of {len(self.paths)} files of {name!r} are not like the first, "
                f"{self.paths[0].name} of {self.dtype} {self.shape}: "
                f"{listed([odd[file] for file in sorted(odd)])}"
            )

    def reopened(self, open_file: OpenFile) -> Dataset:
        """The same samples, read by what ``open_file`` gives for each of the files."""
        other = copy(self)
        other.open_file, other._readers, other._versions = open_file, {}, {}
        return other

    def split(self, *, seed: int = 0, **parts: float | Sequence[int]) -> dict[str, Dataset]:
        """Parts of the samples by name: lists of samples, or fractions of the rest, drawn by seed.

        ``data.split(train=0.8, validation=0.1, test=0.1)`` gives each sample to one of three.
        """
        chosen = split_samples(len(self), parts, seed)
        return {name: self.take(indices) for name, indices in chosen.items()}

    def place_of(self, index: int) -> tuple[Path, int]:
        """The file of sample ``index``, and its number there; tiles are counted like samples."""
        file, number = self._find(index)
        return self.paths[file], number

    def _find(self, index: int) -> tuple[int, int]:
        if self._chosen is not None:
            index = int(self._chosen[index])
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)

    def read(
        self,
        index: int,
        box: BoxLike | None = None,
        out: NDArray[Any] | None = None,
        *,
        array: str | None = None,
    ) -> NDArray[Any]:
        """``box`` of sample ``index``, in ``out`` if that is given.

        ``box`` is a tuple of slices of the sample, channels first; left out, it is the whole
        sample. ``out`` has the box's shape and the file's dtype; its strides are free, and a buffer
        that lies in the file's order of dims is filled without another copy. ``array`` names
        another array than the sample. Safe to call from many threads.
        """
        index = self._checked_index(index)
        spec = self.spec if array is None else self._spec_of(array)
        wanted = checked_box(box, spec)
        out = checked_out(out, wanted, spec)
        file, number = self._find(index)
        try:
            reader = self._reader(file, spec.name)
            if out.size:
                reader.read(spec.axes.file_box(number, wanted), spec.axes.file_view(out))
        except FormatError as error:
            where = f"{self.name_of(index)}, array {spec.name!r}"
            raise FormatError(f"{where}: {error}") from error
        return out

    def name_of(self, index: int) -> str:
        """Sample ``index`` in words, with what it is a tile of."""
        if not self.tilings:
            return f"sample {index}"
        sample, tile = divmod(self._find(index)[1], self._num_tiles)
        return f"sample {index} (tile {tile} of sample {sample} in its file)"

    @property
    def _num_tiles(self) -> int:
        """That each of the files' samples has become."""
        return math.prod(tiling.num_tiles for tiling in self.tilings)

    def reader(self, index: int, array: str) -> ArrayReader:
        """The reader of the file that sample ``index`` lies in, for one of its arrays."""
        return self._reader(self._find(index)[0], array)

    def _reader(self, file: int, array: str) -> ArrayReader:
        if file not in self._readers:
            self._readers[file] = self._opened(file)
        return self._readers[file][list(self.arrays).index(array)]

    def fix_versions(self) -> list[tuple[int, int] | None]:
        """What every file is like now; one that is another when it is opened later raises.

        So ranks that do this at the same time cannot read different versions of a file.
        """
        files = [file for file in range(len(self.paths)) if file not in self._versions]
        for_each(self._note_version, files)
        return [self._versions[file] for file in range(len(self.paths))]

    def _note_version(self, file: int) -> None:
        self._versions.setdefault(file, _version(self.paths[file]))

    def _opened(self, file: int) -> list[ArrayReader]:
        path = self.paths[file]
        self._note_version(file)
        readers = self.open_file(path)
        if _version(path) != self._versions[file]:
            raise FormatError(
                f"{path} has changed since it was first looked at: it is being written to, or was "
                "replaced; open the data again when it is finished"
            )
        count = self._ends[file] - (self._ends[file - 1] if file else 0)
        for spec, reader in zip(self.arrays.values(), readers, strict=True):
            check_like(spec, reader, path)
            if (found := spec.axes.num_samples(reader.shape)) != count:
                raise FormatError(
                    f"{path} has {found // self._num_tiles} samples in {spec.name!r}, and "
                    f"{count // self._num_tiles} were expected"
                )
        return readers

    def _checked_index(self, index: int) -> int:
        if type(index) is not int and not isinstance(index, int | np.integer):
            raise ConfigError(f"samples are numbered, and {index!r} is not a whole number")
        found = int(index) + len(self) if index < 0 else int(index)
        if not 0 <= found < len(self):
            raise ConfigError(f"there is no sample {index}: the dataset has {len(self)} samples")
        return found

    def _spec_of(self, array: str) -> ArraySpec:
        if array not in self.arrays:
            raise ConfigError(f"no array {array!r} was opened: there are {list(self.arrays)}")
        return self.arrays[array]


def _open_joined(
    openers: Sequence[OpenFile], partners: Mapping[Path, list[Path]], path: Path
) -> list[ArrayReader]:
    """The arrays of a file, and one of each of the files that lie beside it."""
    first, *others = openers
    pairs = zip(others, partners[path], strict=True)
    return [*first(path), *(open_file(partner)[0] for open_file, partner in pairs)]


def _version(path: Path) -> tuple[int, int] | None:
    try:
        return Identity.of(path.stat()).version
    except OSError:  # told when it is read
        return None


def rank_boxes(dataset: Dataset, grid: Grid, ranks: Iterable[int]) -> dict[str, Box]:
    """The box of each array that holds what all of ``ranks`` read of one sample."""
    coords = [grid.coords[rank] for rank in ranks]
    layouts = {name: sample_layout(spec, grid) for name, spec in dataset.arrays.items()}
    return {
        name: around([layout.box(place) for place in coords]) for name, layout in layouts.items()
    }
