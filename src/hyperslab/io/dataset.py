"""Samples in files, and any box of any of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError, listed
from hyperslab.io.engine.threads import for_each
from hyperslab.io.index import save_manifest
from hyperslab.io.manifest import Manifest, Source, version_of
from hyperslab.io.pairing import as_target, pair
from hyperslab.io.reader import ArrayReader
from hyperslab.io.schedule import Indices, split_samples
from hyperslab.io.spec import (
    ArraySpec,
    BoxLike,
    around,
    check_like,
    checked_box,
    checked_out,
    is_like,
    is_on_grid,
    sample_layout,
    shown_shape,
)
from hyperslab.io.tables import Attributes, Table
from hyperslab.io.tiled import Tiling
from hyperslab.layout import Box, Grid, Layout


class Dataset:
    """Samples of one shape, in any number of files: a manifest, and the readers of its files.

    Made by ``hyperslab.open``.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        """Which samples there are, and where each of their arrays lies."""
        self.arrays = manifest.arrays
        """By name; the sample itself comes first."""
        self._readers: dict[tuple[int, int], list[ArrayReader]] = {}
        """By source and file."""
        self.layouts: Mapping[str, Layout] = {}
        """How ranks have cut one sample of the arrays that they hold already, by name."""
        self.owned_in: int | None = None
        """The epoch in whose order they hold them; None where samples are yet to be read."""

    def __getstate__(self) -> dict[str, Any]:
        """Without readers, which another process makes for itself."""
        return {**self.__dict__, "_readers": {}}

    def __len__(self) -> int:
        return len(self.manifest)

    def __repr__(self) -> str:
        what = f"{'tiles' if self.tilings else 'samples'} of {shown_shape(self.shape)} {self.dtype}"
        return f"Dataset({len(self)} {what} in {len(self.paths)} files)"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of the samples, without those that lie beside them."""
        return tuple([file.path for file in self.manifest.files])

    @property
    def stats(self) -> str | None:
        """The array with each sample's statistics: a row a channel, of min, max, mean and std."""
        return self.manifest.stats

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """How the files' samples were cut into those of this dataset, if they were."""
        return self.manifest.sources[0].tilings

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the manifest as JSON, which ``hyperslab.open`` opens at once."""
        save_manifest(self.manifest, Path(path))

    def take(self, indices: Sequence[int] | Indices) -> Dataset:
        """The samples ``indices`` alone, in that order, from the same files."""
        part = Dataset(self.manifest.take(indices))
        part._readers = self._readers
        return part

    def tiled(self, extents: int | Sequence[int]) -> Dataset:
        """The same data with every sample cut into tiles, each of them a sample of its own.

        ``extents`` are the lengths of a tile along depth, height and width, or one for all; they
        divide the sample's, and channels stay whole. Of ``n`` tiles a sample, in row-major order,
        sample ``i`` is tile ``i % n`` of what was sample ``i // n``. Label maps are cut alike, all
        other arrays are there again for every tile.
        """
        return Dataset(self.manifest.tile(extents))

    def beside(
        self, *, by: str | os.PathLike[str] | None = None, **others: Dataset | Table | Attributes
    ) -> Dataset:
        r"""The same samples, with those of other files beside them, file by file.

        ``hs.open("images/*.nii").beside(label=hs.open("labels/*.nii"))`` has the label maps under
        the name ``label``, and cuts them like the images where their spatial extents are the same.
        ``beside(y=hs.table("targets.csv"))`` gives each sample a row of a table, and
        ``beside(y=hs.attributes("mass", "age"))`` numbers that its own HDF5 file notes.

        Files go together by name: without folder and suffix they are the same, or what stands for
        the wildcards of their patterns is, as of ``images/img*.nii`` and ``labels/seg*.nii``.
        ``by`` is a regular expression whose groups are compared instead, such as ``r"(\d+)"``; a
        CSV file that names partners, a pair a row; ``order``: the first file with the first; or
        ``row``: the first sample with the first, whatever their files. It is an error if one has no
        partner, or if label maps have other extents than the samples, or extents that do not divide
        theirs.
        """
        return joined(self, others, by)

    def split(self, *, seed: int = 0, **parts: float | Sequence[int]) -> dict[str, Dataset]:
        """Parts of the samples by name: lists of samples, or fractions of the rest, drawn by seed.

        ``data.split(train=0.8, validation=0.1, test=0.1)`` gives each sample to one of three.
        """
        chosen = split_samples(len(self), parts, seed)
        return {name: self.take(indices) for name, indices in chosen.items()}

    def place_of(self, index: int) -> tuple[Path, int]:
        """The file of sample ``index``, and its number there; tiles are counted like samples."""
        file, number = self.manifest.place(index)
        return self.manifest.files[file].path, number

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
        source, position = self.manifest.columns[spec.name]
        file, number = self.manifest.place(index, source)
        try:
            reader = self._opened(source, file)[position]
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
        sample, tile = divmod(self.manifest.place(index)[1], self.manifest.sources[0].num_tiles)
        return f"sample {index} (tile {tile} of sample {sample} in its file)"

    def reader(self, index: int, array: str) -> ArrayReader:
        """The reader of the file that sample ``index`` lies in, for one of its arrays."""
        source, position = self.manifest.columns[array]
        return self._opened(source, self.manifest.place(index, source)[0])[position]

    def _opened(self, source: int, file: int) -> list[ArrayReader]:
        """The readers of a file, which is as it was when the manifest was made."""
        readers = self._readers.get((source, file))
        if readers is None:
            readers = self._readers[source, file] = open_checked(
                self.manifest.sources[source], file
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


def joined(
    dataset: Dataset,
    others: Mapping[str, Dataset | Table | Attributes],
    by: str | os.PathLike[str] | None,
    *,
    setting: str = "by",
) -> Dataset:
    """``dataset`` with ``others`` beside it; the user knows ``by`` as ``setting``."""
    found, rows = dict[str, Manifest](), dict[str, Indices]()
    for name, other in others.items():
        if name in dataset.arrays:
            raise ConfigError(f"there is an array {name!r} already: give the other a new name")
        if isinstance(other, Dataset):
            rows[name] = pair(dataset.manifest, other.manifest, name, by, setting=setting)
            found[name] = as_target(other.manifest, name, dataset.manifest)
            _check_files_alike(dataset, other, rows[name], name)
        else:
            found[name], rows[name] = other.join_to(dataset.manifest, name, by, setting=setting)
    return Dataset(dataset.manifest.join(found, rows))


def open_checked(source: Source, number: int) -> list[ArrayReader]:
    """The readers of a file; raises unless all is as the manifest says."""
    file = source.files[number]
    readers = source.open(file.path)
    for spec, reader in zip(source.arrays, readers, strict=True):
        check_like(spec, reader, file.path)
        if (found := spec.axes.num_samples(reader.shape)) != file.num_rows * source.num_tiles:
            raise FormatError(
                f"{file.path} has {found // source.num_tiles} samples in {spec.name!r}, and "
                f"{file.num_rows} were expected"
            )
    version = version_of(file.path)
    if None not in (version, file.version) and version != file.version:
        raise FormatError(
            f"{file.path} has changed since it was first looked at: it is being written to, or was "
            "replaced; open the data again when it is finished"
        )
    return readers


def _check_files_alike(dataset: Dataset, other: Dataset, rows: Indices, name: str) -> None:
    """Raises if files have other shapes than the first, and other extents than their samples.

    Those that cannot be opened are told when they are read.
    """
    mine, (source,) = dataset.manifest.sources[0], other.manifest.sources
    spec, sample = source.arrays[0], mine.arrays[0]
    partners = dict(
        zip(
            other.manifest.places[rows, 0, 0].tolist(),
            dataset.manifest.places[:, 0, 0],
            strict=True,
        )
    )
    odd: dict[int, str] = {}

    def look(number: int) -> None:
        path = source.files[number].path
        try:
            reader = source.open(path)[0]
            if is_like(spec, reader):
                return
            beside = mine.open(mine.files[partners[number]].path)[0]
        except FormatError:
            return
        if not is_on_grid(spec, reader, sample, beside):
            odd[number] = f"{path.parent.name}/{path.name} has {reader.dtype} {reader.shape}"

    for_each(look, sorted(partners))
    if odd:
        raise FormatError(
            f"{len(odd)} of {len(source.files)} files of {name!r} are not like the first, "
            f"{source.files[0].path.name} of {other.dtype} {other.shape}: "
            f"{listed([odd[number] for number in sorted(odd)])}"
        )


def rank_boxes(dataset: Dataset, grid: Grid, ranks: Iterable[int]) -> dict[str, Box]:
    """The box of each array that holds what all of ``ranks`` read of one sample."""
    coords = [grid.coords[rank] for rank in ranks]
    layouts = {name: sample_layout(spec, grid) for name, spec in dataset.arrays.items()}
    return {
        name: around([layout.box(place) for place in coords]) for name, layout in layouts.items()
    }
