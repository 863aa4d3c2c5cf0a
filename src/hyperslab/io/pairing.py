"""Which samples belong beside which: by the names of their files, by a list, or by their order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

import numpy as np

from hyperslab.errors import ConfigError, listed
from hyperslab.io.formats.csv_table import SUFFIXES as TABLE_SUFFIXES, CsvFile
from hyperslab.io.manifest import Manifest, SourceFile
from hyperslab.io.reader import suffix_of
from hyperslab.io.schedule import Indices
from hyperslab.io.spec import check_on_grid, has_same_space

BY_ORDER = "order"
BY_ROW = "row"

Key = tuple[str, ...] | None
Way = Callable[[SourceFile], Key]

_WILDCARDS = {"**/": "(?:(.*)/)?", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}
_TOKENS = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])")


def named_by(path: str, pattern: str) -> SourceFile:
    """A file that ``pattern`` has found, with what its wildcards stand for there."""
    match = _expression(pattern).fullmatch(path)
    return SourceFile(Path(path), tuple(part or "" for part in match.groups()) if match else ())


@lru_cache(16)
def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern of files as a regular expression, with a group for each wildcard."""
    parts = _TOKENS.split(pattern)
    for place in range(1, len(parts), 2):
        characters = parts[place]
        parts[place] = _WILDCARDS.get(characters) or f"({characters.replace('[!', '[^', 1)})"
    parts[::2] = map(re.escape, parts[::2])
    return re.compile("".join(parts), re.DOTALL)


def as_target(other: Manifest, name: str, manifest: Manifest) -> Manifest:
    """The first array of ``other``, to be put beside the samples under ``name``.

    It is cut like them where it has their spatial extents; raises if it is a map of others.
    """
    if len(other.sources) > 1:
        raise ConfigError(f"{name!r} has arrays beside it itself: put each beside the samples")
    (source,), sample = other.sources, manifest.sources[0].arrays[0]
    spec = source.arrays[0]
    check_on_grid(name, spec, sample, source.files[0].path)
    is_cut = has_same_space(spec.axes.names, spec.shape, sample)
    if source.tilings and not is_cut:
        raise ConfigError(f"tiles of {name!r} are not like those of the samples: cut both alike")
    opening = replace(source.opening, names=source.opening.names[:1])
    files = tuple([replace(file, looks=file.looks[:1]) for file in source.files])
    whole = (replace(source.whole[0], is_cut=is_cut),)
    return replace(other, sources=(replace(source, opening=opening, whole=whole, files=files),))


def pair(
    manifest: Manifest,
    other: Manifest,
    name: str,
    by: str | os.PathLike[str] | None = None,
    *,
    setting: str = "by",
) -> Indices:
    """The sample of ``other``, which holds the array ``name``, that belongs to each sample.

    By the names of their files, as ``pair_files`` does; ``row`` counts samples, not files.
    """
    if by == BY_ROW:
        if len(other) != len(manifest):
            raise ConfigError(
                f"{len(other)} rows of {name!r} cannot be put beside {len(manifest)} samples in "
                "their order: as many were expected"
            )
        return np.arange(len(manifest))
    for each in (manifest, other):
        paths = [file.path for file in each.files]
        if len(set(paths)) < len(paths):
            raise ConfigError("a file is named twice, so it cannot be said what lies beside it")
    partners = pair_files(manifest.files, other.files, name, by, setting=setting)
    return _same_rows(manifest, other, name, partners)


def _same_rows(manifest: Manifest, other: Manifest, name: str, partners: Sequence[Path]) -> Indices:
    """The sample of the same number in the partner of each sample's file."""
    mine, theirs = manifest.sources[0], other.sources[0]
    numbers = {file.path: number for number, file in enumerate(theirs.files)}
    odd = [
        f"{file.path.name} has {count}, {partner.name} {their_count}"
        for file, partner in zip(mine.files, partners, strict=True)
        if (count := file.num_rows * mine.num_tiles)
        != (their_count := theirs.files[numbers[partner]].num_rows * theirs.num_tiles)
    ]
    if odd:
        raise ConfigError(
            f"{name!r} cannot be put beside {list(manifest.arrays)}, for as many samples in each "
            f"file were expected: {listed(odd)}"
        )
    places = other.places[:, 0].tolist()
    found = {(file, number): index for index, (file, number) in enumerate(places)}
    file_of = [numbers[partner] for partner in partners]
    wanted = [(file_of[file], number) for file, number in manifest.places[:, 0].tolist()]
    if missing := [place for place in wanted if place not in found]:
        file, number = missing[0]
        raise ConfigError(
            f"{len(missing)} of {len(wanted)} samples have no {name!r}, the first number {number} "
            f"of {theirs.files[file].path}: put data beside data before samples are taken"
        )
    return np.array([found[place] for place in wanted], np.int64)


def pair_files(
    files: Sequence[SourceFile],
    others: Sequence[SourceFile],
    name: str,
    by: str | os.PathLike[str] | None = None,
    *,
    setting: str = "by",
) -> list[Path]:
    """The one of ``others``, which hold the array ``name``, that belongs to each of ``files``.

    Those belong together whose names are the same but for folder and suffix, or for whose patterns
    the wildcards stand for the same: ``images/img*.nii`` and ``labels/seg*.nii`` pair by number.
    ``by`` is a regular expression instead, whose groups are compared, a CSV file of pairs, or
    ``order``; the user knows it as ``setting``. Raises unless every file has exactly one partner.
    """
    if is_table(by):
        return _listed_pairs(files, others, name, Path(by))
    has_pattern = any(file.wild for file in (*files, *others))
    if by == BY_ORDER or (len(files) == len(others) == 1 and not has_pattern):
        if len(files) != len(others):
            raise ConfigError(
                f"{len(others)} files of {name!r} cannot be put beside {len(files)} in their "
                "order: as many were expected"
            )
        return [other.path for other in others]
    ways = [stem, _wild] if by is None else [groups_of(os.fspath(by), setting)]
    tries = [_Pairs.made(files, others, way, way) for way in ways]
    pairs = next((each for each in tries if each.is_whole), None)
    if pairs is None:
        nearest = max(tries, key=lambda each: len(each.partners))
        raise ConfigError(
            f"{len(others)} files of {name!r} cannot be put beside {len(files)} by name: "
            f"{nearest.trouble(name)}; name partners alike, or by patterns whose * stands for the "
            "same, such as 'images/img*.nii' and 'labels/seg*.nii', or say by what they go "
            rf"together, such as {setting} = '(\d+)'"
        )
    return [pairs.partners[file.path] for file in files]


def is_table(by: str | os.PathLike[str] | None) -> TypeGuard[str | os.PathLike[str]]:
    """Whether names are paired by a file that lists them."""
    return by is not None and os.fspath(by).lower().endswith(TABLE_SUFFIXES)


def _listed_pairs(
    files: Sequence[SourceFile], others: Sequence[SourceFile], name: str, path: Path
) -> list[Path]:
    """The partners that a CSV file names: a row a pair, the file first, then its partner.

    The partner is in the column called ``name``, where there is one, else in the second.
    """
    table = CsvFile.read(path)
    column = table.header.index(name) if name in table.header[1:] else 1
    if len(table.header) < 2:
        raise ConfigError(f"{path} lists no pairs: a column of files and one of partners is needed")
    mine = match_names([row[0] for row in table.rows], files, f"{path}, {table.header[0]!r}")
    theirs = match_names(
        [row[column] for row in table.rows], others, f"{path}, {table.header[column]!r}"
    )
    by_row = {row: number for number, row in enumerate(theirs)}
    return [others[by_row[row]].path for row in mine]


def match_names(
    cells: Sequence[str],
    files: Sequence[SourceFile],
    what: str,
    by: tuple[str, str] | None = None,
) -> list[int]:
    """The one of ``cells``, which name files, that belongs to each of ``files``.

    A cell has a file's name with or without folder and suffix, or what the wildcards of its pattern
    stand for; ``by`` is a regular expression whose groups are compared instead. Raises unless there
    is exactly one for every file, and none is left over.
    """
    rows = [SourceFile(Path(cell), (cell,)) for cell in cells]
    ways = [(groups_of(*by),) * 2] if by else _ways_of_cells(cells)
    tries = [_Pairs.made(files, rows, *way) for way in ways]
    found = next((each for each in tries if each.is_whole), None)
    if found is None:
        found = max(tries, key=lambda each: len(each.partners))
        raise ConfigError(
            f"{what} does not name each of {len(files)} files once in its {len(cells)} rows: "
            f"{found.row_trouble({row.path for row in rows})}"
        )
    numbers = {row.path: number for number, row in enumerate(rows)}
    return [numbers[found.partners[file.path]] for file in files]


def _ways_of_cells(cells: Sequence[str]) -> list[tuple[Way, Way]]:
    """How a file and the cell that names it are compared."""
    depth = max((len(Path(cell).parts) for cell in cells), default=1)

    def tail(file: SourceFile) -> Key:
        return (*file.path.parts[-depth:-1], *_known_stem(file))

    return [
        (stem, _known_stem),
        (lambda file: (file.path.name,), lambda cell: (cell.path.name,)),
        (tail, lambda cell: (*cell.path.parts[:-1], *_known_stem(cell))),
        (_wild, _wild),
    ]


def _known_stem(file: SourceFile) -> tuple[str, ...]:
    """The name without the suffix of a format: what else follows a dot may be a number."""
    suffix = suffix_of(file.path)
    return (file.path.name[: -len(suffix)] if suffix else file.path.name,)


def _wild(file: SourceFile) -> Key:
    """What wildcards stand for."""
    return file.wild or None


def stem(file: SourceFile) -> Key:
    """The name without the suffix of its format, whatever that is."""
    return _known_stem(file) if suffix_of(file.path) else (file.path.stem,)


def groups_of(by: str, setting: str) -> Way:
    """What the groups of the regular expression ``by`` stand for in a file's name."""
    try:
        expression = re.compile(by)
    except re.error as error:
        raise ConfigError(f"{setting} = {by!r} is not a regular expression: {error}") from error
    if not expression.groups:
        raise ConfigError(
            f"{setting} = {by!r} has no group: put what names have in common into parentheses, "
            rf"such as '(\d+)', or use {BY_ORDER!r}"
        )

    def groups(file: SourceFile) -> Key:
        match = expression.search(file.path.name)
        return tuple(part or "" for part in match.groups()) if match else None

    return groups


@dataclass(frozen=True)
class _Pairs:
    """What one way to compare names has found."""

    partners: Mapping[Path, Path]
    without: Sequence[Path]
    """Files that have no partner."""
    unused: Sequence[Path]
    """Others that are nobody's."""
    alike: Sequence[Path]
    """Files and others that cannot be told from another one."""

    @classmethod
    def made(
        cls, files: Sequence[SourceFile], others: Sequence[SourceFile], way: Way, other_way: Way
    ) -> _Pairs:
        mine, theirs = _by_key(files, way), _by_key(others, other_way)
        alike = [path for found in (mine, theirs) for paths in found.values() for path in paths[1:]]
        partners = {paths[0]: theirs[key][0] for key, paths in mine.items() if key in theirs}
        paired = {*partners, *partners.values(), *alike}
        return cls(
            partners,
            [file.path for file in files if file.path not in paired],
            [other.path for other in others if other.path not in paired],
            alike,
        )

    @property
    def is_whole(self) -> bool:
        return not (self.without or self.unused or self.alike)

    def trouble(self, name: str) -> str:
        """Which files are not paired, in words."""
        parts = [
            (self.without, f"no {name!r} for"),
            (self.unused, "nothing to go with"),
            (self.alike, "another of the same name as"),
        ]
        return "; ".join(f"{words} {_listed(paths)}" for paths, words in parts if paths)

    def row_trouble(self, rows: Collection[Path]) -> str:
        """The same of rows of a table that name files."""
        doubled = [str(path) for path in dict.fromkeys(self.alike) if path in rows]
        files = [path.name for path in self.alike if path not in rows]
        parts = [
            ([path.name for path in self.without], "{} without a row: {}"),
            (list(map(str, self.unused)), "{} rows without a file: {}"),
            (doubled, "{} named by several rows: {}"),
            (files, "{} that no row tells from another: {}"),
        ]
        return "; ".join(words.format(len(names), listed(names)) for names, words in parts if names)


def _by_key(files: Sequence[SourceFile], way: Way) -> dict[tuple[str, ...], list[Path]]:
    found: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        if (key := way(file)) is not None:
            found.setdefault(key, []).append(file.path)
    return found


def _listed(paths: Sequence[Path]) -> str:
    return listed([f"{path.parent.name}/{path.name}" for path in paths])
