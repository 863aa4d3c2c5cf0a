"""Samples in files, and any box of any of them."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError, LayoutError
from hyperslab.io.axes import GUESSES, SampleAxes, axes_of
from hyperslab.io.buffers import empty_aligned
from hyperslab.io.presets import PRESETS
from hyperslab.io.reader import ArrayReader, Format, find_format
from hyperslab.io.schedule import Indices, split_samples
from hyperslab.layout import Box, Span

T = TypeVar("T")
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
BoxLike = Box | tuple[slice, ...]


@dataclass(frozen=True)
class ArraySpec:
    """One array of every sample: the image, a label map, a vector of targets, a weight."""

    name: str
    axes: SampleAxes
    shape: tuple[int, ...]
    """Of one sample, channels first."""
    dtype: np.dtype[Any]
    """As in the file, in this machine's byte order."""
    is_cut: bool
    """Whether it has the sample's spatial dims, and is cut with them; a vector is not."""


class Dataset:
    """Samples of one shape, in any number of files; made by ``hyperslab.open``."""

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        arrays: Sequence[ArraySpec],
        open_file: Callable[[Path], list[ArrayReader]],
        options: Mapping[str, Any],
        stats: str | None = None,
    ) -> None:
        self.paths = tuple(paths)
        self.options = dict(options)
        """What it was opened with, to open files like these again."""
        self.arrays = {spec.name: spec for spec in arrays}
        """By name; the sample itself comes first."""
        self.stats = stats
        """The array with each sample's statistics: a row a channel, of min, max, mean and std."""
        self._chosen: Indices | None = None
        self._ends = list(accumulate(counts))
        self.open_file = open_file
        """The readers of a file like these, one an array."""
        self._readers: dict[int, list[ArrayReader]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"Dataset({len(self)} samples of {shape} {self.dtype} in {len(self.paths)} files)"

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
        chosen = split_samples(len(self), {"taken": indices})["taken"]
        part = copy(self)
        part._chosen = chosen if self._chosen is None else self._chosen[chosen]
        return part

    def reopened(self, open_file: Callable[[Path], list[ArrayReader]]) -> Dataset:
        """The same samples, read by what ``open_file`` gives for each of the files."""
        other = copy(self)
        other.open_file, other._readers = open_file, {}
        return other

    def split(self, *, seed: int = 0, **parts: float | Sequence[int]) -> dict[str, Dataset]:
        """Parts of the samples by name: fractions of all, drawn by ``seed``, or lists of samples.

        ``data.split(train=0.8, validation=0.1, test=0.1)`` gives each sample to one of three.
        """
        chosen = split_samples(len(self), parts, seed)
        return {name: self.take(indices) for name, indices in chosen.items()}

    def place_of(self, index: int) -> tuple[Path, int]:
        """The file of sample ``index``, and its number there."""
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
        spec = self._spec_of(array)
        wanted = checked_box(box, spec)
        out = _checked_out(out, wanted, spec)
        _, number = self._find(index)
        try:
            reader = self.reader(index, spec.name)
            if wanted:
                reader.read(spec.axes.file_box(number, wanted), spec.axes.file_view(out))
        except FormatError as error:
            raise FormatError(f"sample {index}, array {spec.name!r}: {error}") from error
        return out

    def reader(self, index: int, array: str) -> ArrayReader:
        """The reader of the file that sample ``index`` lies in, for one of its arrays."""
        file, _ = self._find(index)
        if file not in self._readers:
            self._readers[file] = self._opened(file)
        return self._readers[file][list(self.arrays).index(array)]

    def _opened(self, file: int) -> list[ArrayReader]:
        path = self.paths[file]
        readers = self.open_file(path)
        count = self._ends[file] - (self._ends[file - 1] if file else 0)
        for spec, reader in zip(self.arrays.values(), readers, strict=True):
            _check_like(spec, reader, count, path)
        return readers

    def _checked_index(self, index: int) -> int:
        found = index + len(self) if index < 0 else index
        if not 0 <= found < len(self):
            raise ConfigError(f"there is no sample {index}: the dataset has {len(self)} samples")
        return found

    def _spec_of(self, array: str | None) -> ArraySpec:
        if array is None:
            return self.spec
        if array not in self.arrays:
            raise ConfigError(f"no array {array!r} was opened: there are {list(self.arrays)}")
        return self.arrays[array]


def open(
    paths: Paths,
    *,
    sample: str | None = None,
    target: str | Sequence[str] | None = None,
    axes: str | Mapping[str, str] | None = None,
    stats: str | None = None,
    preset: str | None = None,
    format: str | None = None,
    **options: Any,
) -> Dataset:
    """The samples in the files that ``paths`` names: a file, a pattern such as ``cosmo/*.h5``, or
    several of these.

    Args:
        paths: Files are taken in the order of a list, and of their names for a pattern.
        sample: The array that holds the sample; may be left out where a file has but one.
        target: The array or arrays that belong to it: label maps with the sample's spatial extents
            are cut like it, all others are not.
        axes: The dims of the sample in the file's order, such as ``DHWC``; with an ``N`` in front,
            or one letter fewer than dims, a file holds many samples. A mapping gives those of
            several arrays, by name.
        stats: The array with each sample's own statistics, a row a channel: min, max and, where
            there are four columns, mean and standard deviation.
        preset: A known schema (``hyperslab.io.PRESETS``) that gives what is not given here.
        format: The file format, where the suffix does not tell it.
        options: For the format, such as ``dtype``, ``shape`` and ``offset`` of raw files.
    """
    asked = {"sample": sample, "target": target, "axes": axes, "stats": stats, "format": format}
    given = {name: value for name, value in asked.items() if value is not None}
    known = {**dict.fromkeys(asked), **_preset(preset), **given}
    settings = {**{name: known.pop(name) for name in set(known) - set(asked)}, **options}
    files = find_files(paths)
    cls = find_format(files[0], known["format"])
    names = _names(cls, files[0], known, settings)
    letters = known["axes"]
    by_name = {names[0]: letters} if isinstance(letters, str) else dict(letters or {})
    if unknown := sorted(set(by_name) - set(names)):
        raise ConfigError(f"axes are given for {unknown}, but the arrays opened are {names}")

    def open_file(path: Path) -> list[ArrayReader]:
        return _open_file(cls, path, names, settings)

    first = open_file(files[0])
    specs = _specs(files[0], names, first, by_name)
    counts = _counts(files, specs[0], first, open_file)
    return Dataset(files, counts, specs, open_file, {**known, **settings}, known["stats"])


def find_files(paths: Paths) -> list[Path]:
    """The files that ``paths`` name, with every pattern replaced by what fits it."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[Path] = []
    for path in given:
        text = os.fspath(path)
        matches = [text]
        if glob.has_magic(text) and not Path(text).exists():
            matches = sorted(glob.iglob(text, recursive=True))  # noqa: PTH207 - absolute too
        if not matches:
            raise FormatError(f"no file fits {text!r} (looked from {Path.cwd()})")
        found += map(Path, matches)
    if not found:
        raise ConfigError("no files were given: name one, or a pattern such as 'cosmo/*.h5'")
    return found


def checked_box(box: BoxLike | None, spec: ArraySpec) -> Box:
    """``box`` as a ``Box`` of one sample; raises unless it lies inside."""
    if box is None:
        return Box.whole(spec.shape)
    if isinstance(box, Box):
        spans = box.spans
    else:
        spans = tuple(
            _span(part, extent, box, spec) for part, extent in zip(box, spec.shape, strict=False)
        )
    fits = len(spans) == len(box.spans if isinstance(box, Box) else box) == len(spec.shape)
    if not fits or not Box.whole(spec.shape).contains(Box(spans)):
        raise LayoutError(
            f"box {_shown(box)} does not lie in array {spec.name!r}, whose samples have shape "
            f"{spec.shape}: give a slice for each of its {len(spec.shape)} dims"
        )
    return Box(spans)


def _span(part: object, extent: int, box: object, spec: ArraySpec) -> Span:
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise LayoutError(
            f"box {_shown(box)} of array {spec.name!r} has {part!r}, and a slice with step 1 was "
            "expected, such as slice(0, 64)"
        )
    start = 0 if part.start is None else int(part.start)
    stop = extent if part.stop is None else int(part.stop)
    start, stop = (bound + extent if bound < 0 else bound for bound in (start, stop))
    if not 0 <= start <= extent or not 0 <= stop <= extent:
        raise LayoutError(
            f"box {_shown(box)} does not lie in array {spec.name!r}, whose samples have shape "
            f"{spec.shape}"
        )
    return Span(start, max(start, stop))


def _shown(box: object) -> str:
    if isinstance(box, Box):
        return "[" + ", ".join(f"{a}:{b}" for a, b in box.spans) + "]"
    return repr(box)


def _checked_out(out: NDArray[Any] | None, box: Box, spec: ArraySpec) -> NDArray[Any]:
    if out is None:
        order = spec.axes.order
        in_file = empty_aligned(spec.axes.in_file_order(box.shape), spec.dtype)
        return in_file.transpose(order)
    if out.shape != box.shape or out.dtype != spec.dtype:
        raise LayoutError(
            f"out is {out.dtype} {out.shape}, but the box of array {spec.name!r} is {spec.dtype} "
            f"{box.shape}"
        )
    if not out.flags.writeable:
        raise LayoutError("out cannot be written to")
    return out


def _preset(name: str | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}: known are {', '.join(PRESETS)}")
    return PRESETS[name]


def _names(
    cls: type[Format], path: Path, known: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """The arrays to open: the sample, its targets, its statistics."""
    sample, target, stats = known["sample"], known["target"], known["stats"]
    if sample is None:
        found = _explained(cls, path, options, lambda: cls.names(path, **options))
        if len(found) != 1:
            raise ConfigError(
                f"{path} has {len(found)} arrays ({', '.join(found) or 'none'}): say which holds "
                "the sample, such as sample='full'"
            )
        sample = found[0]
    targets = [target] if isinstance(target, str) else list(target or [])
    names = [sample, *targets, *([stats] if stats is not None else [])]
    if len(set(names)) != len(names):
        raise ConfigError(f"arrays {names} are named twice")
    return names


def _open_file(
    cls: type[Format], path: Path, names: Sequence[str], options: Mapping[str, Any]
) -> list[ArrayReader]:
    return _explained(cls, path, options, lambda: cls.open(path, names, **options))


def _explained(
    cls: type[Format], path: Path, options: Mapping[str, Any], call: Callable[[], T]
) -> T:
    try:
        return call()
    except TypeError as error:
        if "keyword argument" not in str(error) and "required" not in str(error):
            raise
        raise ConfigError(
            f"{path} is opened by {cls.__name__}, which does not take options like "
            f"{sorted(options)}: {error}"
        ) from error


def _specs(
    path: Path, names: Sequence[str], readers: Sequence[ArrayReader], letters: Mapping[str, str]
) -> list[ArraySpec]:
    sample = _sample_spec(path, names[0], readers[0], letters.get(names[0]))
    others = [
        _target_spec(path, name, reader, letters.get(name), sample)
        for name, reader in zip(names[1:], readers[1:], strict=True)
    ]
    return [sample, *others]


def _sample_spec(path: Path, name: str, reader: ArrayReader, letters: str | None) -> ArraySpec:
    ndim = len(reader.shape)
    letters = letters or reader.axes or GUESSES.get(ndim)
    if letters is None:
        raise ConfigError(
            f"array {name!r} of {path} has {ndim} dims: say what they are, such as axes='NCDHW'"
        )
    axes = axes_of(letters, ndim, f"array {name!r} of {path}")
    return ArraySpec(name, axes, axes.sample_shape(reader.shape), reader.dtype, is_cut=True)


def _target_spec(
    path: Path, name: str, reader: ArrayReader, letters: str | None, sample: ArraySpec
) -> ArraySpec:
    """Its dims as the user named them, or those of the sample where the extents are the same."""
    ndim = len(reader.shape)
    what = f"array {name!r} of {path}"
    one = reader.shape[1:] if sample.axes.stacked else reader.shape
    if letters is None:
        candidates = (sample.axes.letters, sample.axes.letters.replace("C", ""))
        letters = next((c for c in candidates if _same_space(c, one, sample)), None)
    if letters is None:
        axes = SampleAxes("", sample.axes.stacked, ndim - sample.axes.stacked)
    else:
        axes = axes_of(letters, ndim, what)
    if axes.stacked != sample.axes.stacked:
        raise ConfigError(
            f"{what} has shape {reader.shape}, which does not hold as many samples as array "
            f"{sample.name!r}: both hold one sample a file, or both are stacked along the first dim"
        )
    shape = axes.sample_shape(reader.shape)
    return ArraySpec(name, axes, shape, reader.dtype, _same_space(axes.letters, one, sample))


def _same_space(letters: str, shape: Sequence[int], sample: ArraySpec) -> bool:
    if len(letters) != len(shape) or not letters.replace("C", ""):
        return False
    mine = {axis: extent for axis, extent in zip(letters, shape, strict=True) if axis != "C"}
    theirs = dict(zip(sample.axes.names, sample.shape, strict=True))
    theirs.pop("C", None)
    return mine == theirs


def _counts(
    files: Sequence[Path],
    spec: ArraySpec,
    first: Sequence[ArrayReader],
    open_file: Callable[[Path], list[ArrayReader]],
) -> list[int]:
    """How many samples each file has; files with one need not be looked at for that."""
    if not spec.axes.stacked:
        return [1] * len(files)
    others = [open_file(path)[0] for path in files[1:]]
    return [spec.axes.num_samples(reader.shape) for reader in (first[0], *others)]


def _check_like(spec: ArraySpec, reader: ArrayReader, count: int, path: Path) -> None:
    fits = len(reader.shape) == spec.axes.ndim + spec.axes.stacked
    if not fits or spec.axes.sample_shape(reader.shape) != spec.shape or reader.dtype != spec.dtype:
        raise FormatError(
            f"{path} has {reader.dtype} {reader.shape}, but samples of {spec.dtype} {spec.shape} "
            f"were expected (dims {spec.axes.letters or 'as they are'} in the file's order), as in "
            "the first file"
        )
    if (found := spec.axes.num_samples(reader.shape)) != count:
        raise FormatError(f"{path} has {found} samples, and {count} were expected")
