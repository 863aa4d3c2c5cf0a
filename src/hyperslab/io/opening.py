"""From names of files to a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.copying import Meter, Progress
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.threads import for_each
from hyperslab.io.finding import (
    Paths,
    absolute,
    find_named_files,
    is_pattern,
    listed_paths,
    path_text,
)
from hyperslab.io.index import SUFFIX, load_manifest
from hyperslab.io.manifest import (
    Look,
    Manifest,
    Source,
    SourceFile,
    versions_of,
)
from hyperslab.io.presets import PRESETS
from hyperslab.io.reader import STACKED, ArrayReader, Format, Opening, find_format, format_of
from hyperslab.io.sharing import Ranks, shared
from hyperslab.io.spec import (
    ArraySpec,
    SampleAxes,
    axes_of,
    has_same_space,
    readings,
    row_spec,
)


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
    mesh: Ranks | None = None,
    **options: Any,
) -> Dataset:
    """The samples in the files that ``paths`` names: a file, a pattern such as ``cosmo/*.h5``, a
    folder, or several of these; or an index of them, which ``hyperslab data index`` writes.

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
        mesh: From ``hyperslab.init``: rank 0 alone looks at the files, and tells all others what it
            has found. Collective over all ranks.
        options: For the format, such as ``dtype``, ``shape`` and ``offset`` of raw files.
    """
    asked = {"sample": sample, "target": target, "axes": axes, "stats": stats, "format": format}
    given = {name: value for name, value in asked.items() if value is not None}

    def make() -> Manifest:
        if (index := index_of(paths)) is not None:
            more = [*given, *options, *(["preset"] if preset else [])]
            return _indexed(index, more, external=external)
        known = {**dict.fromkeys(asked), **_preset(preset), **given}
        settings = {**{name: known.pop(name) for name in set(known) - set(asked)}, **options}
        _check_types(known)
        return _found(paths, known, settings, external=external)

    return Dataset(make() if mesh is None or mesh.num_ranks == 1 else shared(make, mesh))


def _found(
    paths: Paths, known: Mapping[str, Any], settings: Mapping[str, Any], *, external: bool
) -> Manifest:
    """All samples of the files, whose arrays are as the first file tells."""
    files = absolute(find_named_files(paths, known["format"]))
    path = files[0].path
    opening = _opening(path, known, settings, external=external)
    letters, names = known["axes"], opening.names
    by_name = {names[0]: letters} if isinstance(letters, str) else dict(letters or {})
    if unknown := sorted(set(by_name) - set(names)):
        raise ConfigError(f"axes are given for {unknown}, but the arrays opened are {[*names]}")
    first = opening(path)
    specs = _specs(path, names, first, by_name)
    patterns = tuple(map(_absolute_text, filter(is_pattern, listed_paths(paths))))
    return _manifest(files, opening, first, specs, known["stats"], patterns)


def _indexed(index: Path, given: Sequence[str], *, external: bool) -> Manifest:
    """The manifest in a file, which itself says what is otherwise ``given``."""
    if given:
        raise ConfigError(
            f"{index} tells what its files hold: leave out {', '.join(sorted(given))}"
        )
    manifest = load_manifest(index)
    sources = [
        replace(source, opening=_guarded(source.opening, source.files[0].path, external=external))
        for source in manifest.sources
    ]
    return replace(manifest, sources=tuple(sources))


def _guarded(opening: Opening, path: Path, *, external: bool) -> Opening:
    """The same, but that files may take no data from others unless they may."""
    more = _settings(find_format(path, opening.format), external=external)
    return replace(opening, options={**opening.options, **more})


def open_target(
    paths: Paths,
    sample: ArraySpec,
    axes: str | None = None,
    *,
    rows: bool = False,
    external: bool = True,
) -> Dataset:
    """Files of one array each, to be put beside those of ``sample``.

    Its dims are what ``axes`` or the format say, or the sample's where the extents are the same.
    With ``rows`` the first counts samples, of which each has numbers.
    """
    files = absolute(find_named_files(paths))
    path = files[0].path
    nothing = dict.fromkeys(("sample", "target", "stats", "format"))
    opening = _opening(path, nothing, {}, external=external)
    (reader,) = first = opening(path)
    known = None if reader.axes == STACKED else reader.axes
    if rows and axes is None and len(reader.shape) in (1, 2):
        spec = row_spec(opening.names[0], reader)
    else:
        spec = _target_spec(path, opening.names[0], reader, axes or known, sample)
    return Dataset(_manifest(files, opening, first, [spec]))


def index_of(paths: Paths) -> Path | None:
    """The only one of ``paths``, if it is an index."""
    first, *more = listed_paths(paths) or [None]
    path = first.path if isinstance(first, SourceFile) else first
    return None if more or not str(path).endswith(SUFFIX) else Path(path_text(path))


def _absolute_text(path: object) -> str:
    return str(Path(path_text(path)).absolute())


def _manifest(
    files: Sequence[SourceFile],
    opening: Opening,
    first: Sequence[ArrayReader],
    specs: Sequence[ArraySpec],
    stats: str | None = None,
    patterns: tuple[str, ...] = (),
) -> Manifest:
    """All samples of ``files``: those with one sample are not opened for that, but the first."""
    counts = [1] * len(files)
    if specs[0].axes.stacked:
        others = [opening(file.path)[0] for file in files[1:]]
        counts = [specs[0].axes.num_samples(each.shape) for each in (first[0], *others)]
    versions = versions_of([file.path for file in files])
    seen = [
        SourceFile(file.path, file.wild, version, count)
        for file, version, count in zip(files, versions, counts, strict=True)
    ]
    source = Source(opening, tuple(specs), tuple(seen))
    return Manifest.of_files(source, stats=stats, patterns=patterns)


def looked_at(manifest: Manifest, progress: Progress | None = None) -> Manifest:
    """The same with what every array of every file is like: each file is opened.

    One that cannot be opened is told when it is read.
    """
    meter = Meter(len(manifest.all_files()), progress)
    sources = [
        replace(source, files=_looked_at_files(source, meter)) for source in manifest.sources
    ]
    return replace(manifest, sources=tuple(sources))


def _looked_at_files(source: Source, meter: Meter) -> tuple[SourceFile, ...]:
    found = list(source.files)

    def look(number: int) -> None:
        with suppress(FormatError):
            looks = tuple(map(Look.at, source.opening(found[number].path)))
            found[number] = replace(found[number], looks=looks)
        meter.add(1)

    for_each(look, range(len(found)))
    return tuple(found)


def _opening(
    path: Path, known: Mapping[str, Any], settings: Mapping[str, Any], *, external: bool
) -> Opening:
    """How files like that at ``path`` are opened."""
    name = known["format"] or format_of(path)
    cls = find_format(path, name)
    options = {**settings, **_settings(cls, external=external)}
    return Opening(name, tuple(_names(cls, path, known, options)), options)


def _settings(cls: type[Format], *, external: bool) -> dict[str, Any]:
    """What a format is told that can take data from other files, if it may not."""
    return {"external": False} if cls.reads_other_files and not external else {}


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
        opening = Opening("", (), options)
        found = list(opening.explained(path, lambda: cls.names(path, **options)))
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
