"""Manifests as JSON: written once, opened at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine.files import DataFile
from hyperslab.io.finding import find_named_files
from hyperslab.io.manifest import Look, Manifest, Source, SourceFile, Version, versions_of
from hyperslab.io.measures import Statistics
from hyperslab.io.reader import Opening
from hyperslab.io.spec import ArraySpec, SampleAxes
from hyperslab.io.tiled import Tiling
from hyperslab.partial import write_file

SUFFIX = ".json"
VERSION = 1
MAX_LISTED = 4


def save_manifest(manifest: Manifest, path: Path) -> None:
    """Writes ``manifest``, whole or not at all; paths below its folder are relative to that."""
    if any(source.staged for source in manifest.sources):
        raise ConfigError("what is staged is this node's own: save the manifest of the originals")
    write_file(path, json.dumps(_to_json(manifest, path.absolute().parent)))


def load_manifest(path: Path) -> Manifest:
    """The manifest in a file; raises if one of its files is not as it was."""
    file = DataFile.look_at(path)
    try:
        content = json.loads(bytes(file.read(0, file.size)))
        if not isinstance(content, dict) or content.get("hyperslab") != "manifest":
            raise ValueError("it is no manifest")
        if content["version"] != VERSION:
            raise ValueError(f"it is of version {content['version']}, and {VERSION} is read here")
        found = _from_json(content, path.absolute().parent)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError(
            f"{path} cannot be read as an index of data: {error}; make it by 'hyperslab data "
            f"index DIR -o {path.name}'"
        ) from error
    check_versions(found, path)
    return found


def check_versions(manifest: Manifest, path: Path) -> None:
    """Raises if files are not as the index at ``path`` says, or others have come.

    Each is looked at by one ``stat``.
    """
    files = list({str(file.path): file for file in manifest.all_files()}.values())
    versions = versions_of([file.path for file in files])
    told = [
        words
        for file, version in zip(files, versions, strict=True)
        if (words := _change(file, version))
    ]
    told += [f"{new} is not in it" for new in _new_files(manifest)]
    if told:
        more = f"; and {len(told) - MAX_LISTED} more" if len(told) > MAX_LISTED else ""
        raise FormatError(
            f"{path} is out of date, in {len(told)} of {len(files)} files: "
            f"{'; '.join(told[:MAX_LISTED])}{more}; index the data again"
        )


def _change(file: SourceFile, version: Version | None) -> str | None:
    if version == file.version:
        return None
    if version is None:
        return f"{file.path} is missing"
    if file.version is None:
        return f"{file.path} was missing, and is there"
    if version[0] != file.version[0]:
        return f"{file.path} has changed (from {file.version[0]} to {version[0]} bytes)"
    word = "newer" if version[1] > file.version[1] else "older"
    return f"{file.path} is {word} than when it was indexed"


def _new_files(manifest: Manifest) -> list[Path]:
    """Those that the patterns find by now and that are not in the manifest."""
    if not manifest.patterns:
        return []
    known = {str(file.path) for file in manifest.files}
    found = find_named_files(manifest.patterns)
    return [file.path for file in found if str(file.path) not in known]


# Values as JSON has them


def _to_json(manifest: Manifest, folder: Path) -> dict[str, Any]:
    in_order = Manifest.of_files(manifest.sources[0])
    is_plain = len(manifest.sources) == 1 and np.array_equal(in_order.places, manifest.places)
    return {
        "hyperslab": "manifest",
        "version": VERSION,
        "stats": manifest.stats,
        "patterns": [_short(Path(each), folder) for each in manifest.patterns],
        "statistics": manifest.statistics and manifest.statistics.to_dict(),
        "sources": [_source_to_json(source, folder) for source in manifest.sources],
        "samples": None if is_plain else manifest.places.tolist(),
    }


def _from_json(content: Mapping[str, Any], folder: Path) -> Manifest:
    sources = tuple(_source_from_json(each, folder) for each in content["sources"])
    statistics = content["statistics"]
    found = Manifest.of_files(
        sources[0],
        stats=content["stats"],
        statistics=Statistics.from_dict(statistics) if statistics else None,
        patterns=tuple(str(folder / each) for each in content["patterns"]),
    )
    if content["samples"] is None:
        return found
    places = np.array(content["samples"], np.int64).reshape(-1, len(sources), 2)
    _check_places(places, sources)
    return Manifest(sources, places, found.stats, found.statistics, found.patterns)


def _check_places(places: Any, sources: Sequence[Source]) -> None:
    for number, source in enumerate(sources):
        counts = np.array([file.num_rows * source.num_tiles for file in source.files])
        files, rows = places[:, number].T
        if (files < 0).any() or (files >= len(counts)).any():
            raise ValueError("a sample lies in a file that is not listed")
        if (rows < 0).any() or (rows >= counts[files]).any():
            raise ValueError("a sample lies behind the end of its file")


def _source_to_json(source: Source, folder: Path) -> dict[str, Any]:
    opening = source.opening
    return {
        "format": opening.format,
        "names": list(opening.names),
        "options": {name: _option(value) for name, value in opening.options.items()},
        "arrays": [_spec_to_json(spec) for spec in source.whole],
        "tiles": [list(tiling.extents) for tiling in source.tilings],
        "tiled_as": [_spec_to_json(tiling.sample) for tiling in source.tilings],
        "files": [_file_to_json(file, folder) for file in source.files],
    }


def _source_from_json(content: Mapping[str, Any], folder: Path) -> Source:
    opening = Opening(content["format"], tuple(content["names"]), dict(content["options"]))
    tilings = tuple(
        Tiling(_spec_from_json(sample), tuple(extents))
        for sample, extents in zip(content["tiled_as"], content["tiles"], strict=True)
    )
    files = tuple(_file_from_json(each, folder) for each in content["files"])
    if not files:
        raise ValueError("it has no files")
    return Source(opening, tuple(map(_spec_from_json, content["arrays"])), files, tilings)


def _option(value: Any) -> Any:
    """An option of a format; dtypes by name."""
    if isinstance(value, Mapping):
        return {name: _option(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_option(each) for each in value]
    if isinstance(value, np.dtype | type):
        return np.dtype(value).str
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ConfigError(f"an option of {value!r} cannot be kept in JSON")


def _spec_to_json(spec: ArraySpec) -> dict[str, Any]:
    return {**asdict(spec), "dtype": spec.dtype.str}


def _spec_from_json(content: Mapping[str, Any]) -> ArraySpec:
    axes = SampleAxes(**content["axes"])
    shape, dtype = tuple(content["shape"]), np.dtype(content["dtype"])
    return ArraySpec(content["name"], axes, shape, dtype, bool(content["is_cut"]))


def _file_to_json(file: SourceFile, folder: Path) -> list[Any]:
    looks = [asdict(look) for look in file.looks]
    short = _short(file.path, folder)
    return [short, file.version, file.num_rows, file.wild, looks]


def _file_from_json(content: Sequence[Any], folder: Path) -> SourceFile:
    path, version, num_rows, wild, looks = content
    if type(num_rows) is not int or num_rows < 0:
        raise ValueError(f"{path} has {num_rows!r} samples")
    return SourceFile(
        folder / path,
        tuple(wild),
        None if version is None else (int(version[0]), int(version[1])),
        num_rows,
        tuple(_look_from_json(look) for look in looks),
    )


def _look_from_json(content: Mapping[str, Any]) -> Look:
    affine, spacing = content["affine"], content["spacing"]
    return Look(
        tuple(content["shape"]),
        content["dtype"],
        tuple(map(tuple, affine)) if affine else None,
        tuple(spacing) if spacing else None,
    )


def _short(path: Path, folder: Path) -> str:
    """Relative where it lies below the folder, so that both can move together."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
