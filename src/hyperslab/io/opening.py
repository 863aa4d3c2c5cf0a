"""From names of files to a dataset."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.dataset import Dataset
from hyperslab.io.pairing import NamedFile
from hyperslab.io.presets import PRESETS
from hyperslab.io.reader import STACKED, ArrayReader, Format, find_format
from hyperslab.io.spec import ArraySpec, SampleAxes, axes_of, has_same_space, readings

T = TypeVar("T")
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def open(
    paths: Paths,
    *,
    sample: str | None = None,
    target: str | Sequence[str] | None = None,
    axes: str | Mapping[str, str] | None = None,
    stats: str | None = None,
    preset: str | None = None,
    format: str | None = None,
    external: bool = True,
    **options: Any,
) -> Dataset:
    """The samples in the files that ``paths`` names: a file, a pattern such as ``cosmo/*.h5``, or
    several of these.

    Args:
        paths: Files are taken in the order of a list, and of their names for a pattern.
        sample: The array that holds the sample; may be left out where a file has but one.
        target: The array or arrays that belong to it: label maps with the sample's spatial extents
            are cut like it, all others are not.
        axes: The dims of the sample in the file's order, such as ``DHWC``; with an ``N`` in front
            a file holds many samples. A mapping gives those of several arrays, by name. May be left
            out where the format tells them, as NIfTI does: they are never guessed from a shape.
        stats: The array with each sample's own statistics, a row a channel: min, max and, where
            there are four columns, mean and standard deviation.
        preset: A known schema (``hyperslab.io.PRESETS``) that gives what is not given here.
        format: The file format, where the suffix does not tell it.
        external: Whether files may take data from others that they name: HDF5's external links,
            external data and virtual datasets. False refuses them, for files of strangers.
        options: For the format, such as ``dtype``, ``shape`` and ``offset`` of raw files.
    """
    asked = {"sample": sample, "target": target, "axes": axes, "stats": stats, "format": format}
    given = {name: value for name, value in asked.items() if value is not None}
    known = {**dict.fromkeys(asked), **_preset(preset), **given}
    settings = {**{name: known.pop(name) for name in set(known) - set(asked)}, **options}
    _check_types(known)
    files = _absolute(find_named_files(paths))
    paths_found = [file.path for file in files]
    cls = find_format(paths_found[0], known["format"])
    settings |= _settings(cls, external=external)
    names = _names(cls, paths_found[0], known, settings)
    letters = known["axes"]
    by_name = {names[0]: letters} if isinstance(letters, str) else dict(letters or {})
    if unknown := sorted(set(by_name) - set(names)):
        raise ConfigError(f"axes are given for {unknown}, but the arrays opened are {names}")

    open_file = partial(_open_file, cls, tuple(names), settings)
    first = open_file(paths_found[0])
    specs = _specs(paths_found[0], names, first, by_name)
    counts = _counts(paths_found, specs[0], first, open_file)
    return Dataset(files, counts, specs, open_file, {**known, **settings}, known["stats"])


def open_target(
    paths: Paths, sample: ArraySpec, axes: str | None = None, *, external: bool = True
) -> Dataset:
    """Files of one array each, to be put beside those of ``sample``.

    Its dims are what ``axes`` or the format say, or the sample's where the extents are the same.
    """
    files = _absolute(find_named_files(paths))
    path = files[0].path
    cls = find_format(path)
    settings = _settings(cls, external=external)
    (name,) = _names(cls, path, dict.fromkeys(("sample", "target", "stats")), settings)
    open_file = partial(_open_file, cls, (name,), settings)
    (reader,) = first = open_file(path)
    known = None if reader.axes == STACKED else reader.axes
    spec = _target_spec(path, name, reader, axes or known, sample)
    counts = _counts([file.path for file in files], spec, first, open_file)
    return Dataset(files, counts, [spec], open_file, {"sample": name, "axes": axes})


def _settings(cls: type[Format], *, external: bool) -> dict[str, Any]:
    """What a format is told that can take data from other files, if it may not."""
    return {"external": False} if cls.reads_other_files and not external else {}


def find_files(paths: Paths) -> list[Path]:
    """The files that ``paths`` name, with every pattern replaced by what fits it."""
    return [file.path for file in find_named_files(paths)]


def find_named_files(paths: Paths) -> list[NamedFile]:
    """The same, with what the wildcards of a pattern stand for in each name."""
    given = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    found: list[NamedFile] = []
    for path in given:
        text = _path_text(path)
        matches = [NamedFile(Path(text))]
        if glob.has_magic(text) and not Path(text).exists():
            names = sorted(glob.iglob(text, recursive=True))  # noqa: PTH207 - absolute too
            matches = [NamedFile.found(name, text) for name in names]
        if not matches:
            raise FormatError(f"no file fits {text!r} (looked from {Path.cwd()})")
        found += matches
    if not found:
        raise ConfigError("no files were given: name one, or a pattern such as 'cosmo/*.h5'")
    return found


def _absolute(files: Iterable[NamedFile]) -> list[NamedFile]:
    """The same files wherever the process goes later."""
    return [replace(file, path=file.path.absolute()) for file in files]


def _path_text(path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} names no file: give a path or a pattern, or several")
    return text


def _check_types(known: Mapping[str, Any]) -> None:
    target, axes = known["target"], known["axes"]
    targets = target if isinstance(target, list | tuple) else [target]
    for name in (known["sample"], known["stats"], known["format"], *targets):
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{name!r} is not a name: arrays and formats are named by strings")
    if axes is not None and not isinstance(axes, str | Mapping):
        raise ConfigError(f"axes must be letters such as 'DHWC', or those by array, got {axes!r}")


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
        found = _explained(path, options, lambda: cls.names(path, **options))
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
    cls: type[Format], names: Sequence[str], options: Mapping[str, Any], path: Path
) -> list[ArrayReader]:
    return _explained(path, options, lambda: cls.open(path, names, **options))


def _explained(path: Path, options: Mapping[str, Any], call: Callable[[], T]) -> T:
    try:
        return call()
    except TypeError as error:
        if "keyword argument" not in str(error) and "required" not in str(error):
            raise
        given = f"options {sorted(options)}" if options else "no options"
        raise ConfigError(f"{path} cannot be opened with {given}: {error}") from error


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
    what = f"array {name!r} of {path}"
    if letters is None and reader.axes in (None, STACKED):
        found = readings(reader.shape, stacked=reader.axes == STACKED)
        choices = "samples have one to four, of C, D, H and W, each once"
        if found:
            choices = f"say what they are: {', '.join(found)}, or another order"
        raise ConfigError(
            f"{what} has shape {reader.shape}, which does not tell its dims: {choices}"
        )
    axes = axes_of(_letters(letters, reader), len(reader.shape), what)
    return ArraySpec(name, axes, axes.sample_shape(reader.shape), reader.dtype, is_cut=True)


def _letters(letters: str | None, reader: ArrayReader) -> str:
    """Those that were given, with the N that the format knows of, or those of the format."""
    if letters is None:
        assert reader.axes is not None
        return reader.axes
    is_short = len(letters) == len(reader.shape) - 1
    return STACKED + letters if reader.axes == STACKED and is_short else letters


def _target_spec(
    path: Path, name: str, reader: ArrayReader, letters: str | None, sample: ArraySpec
) -> ArraySpec:
    """Its dims as the user named them, or those of the sample where the extents are the same."""
    ndim = len(reader.shape)
    what = f"array {name!r} of {path}"
    one = reader.shape[1:] if sample.axes.stacked else reader.shape
    if letters is None:
        candidates = (sample.axes.letters, sample.axes.letters.replace("C", ""))
        letters = next((c for c in candidates if has_same_space(c, one, sample)), None)
        if letters is not None and sample.axes.stacked:
            letters = STACKED + letters
    if letters is None:
        axes = SampleAxes("", sample.axes.stacked, ndim - sample.axes.stacked)
    else:
        axes = axes_of(_letters(letters, reader), ndim, what)
    if axes.stacked != sample.axes.stacked or (axes.stacked and not reader.shape):
        raise ConfigError(
            f"{what} has shape {reader.shape}, which does not hold as many samples as array "
            f"{sample.name!r}: both hold one sample a file, or both are stacked along the first dim"
        )
    shape = axes.sample_shape(reader.shape)
    return ArraySpec(name, axes, shape, reader.dtype, has_same_space(axes.letters, one, sample))


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
