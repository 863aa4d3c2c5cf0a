"""Which file belongs beside which, by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import ConfigError
from hyperslab.io.reader import suffix_of

BY_ORDER = "order"
MAX_LISTED = 8

_WILDCARDS = {"**/": "(?:(.*)/)?", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}
_TOKENS = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])")


@dataclass(frozen=True)
class NamedFile:
    """A file, and what the wildcards of the pattern that it was found by stand for."""

    path: Path
    wild: tuple[str, ...] = ()

    @classmethod
    def found(cls, path: str, pattern: str) -> NamedFile:
        match = re.fullmatch(_expression(pattern), path, re.DOTALL)
        return cls(Path(path), tuple(part or "" for part in match.groups()) if match else ())


def _expression(pattern: str) -> str:
    """A pattern of files as a regular expression, with a group for each wildcard."""
    parts = _TOKENS.split(pattern)
    for place in range(1, len(parts), 2):
        characters = parts[place]
        parts[place] = _WILDCARDS.get(characters) or f"({characters.replace('[!', '[^', 1)})"
    parts[::2] = map(re.escape, parts[::2])
    return "".join(parts)


def pair_files(
    files: Sequence[NamedFile],
    others: Sequence[NamedFile],
    name: str,
    by: str | None = None,
    *,
    setting: str = "by",
) -> list[Path]:
    """The one of ``others``, which hold the array ``name``, that belongs to each of ``files``.

    Those belong together whose names are the same but for folder and suffix, or for whose patterns
    the wildcards stand for the same: ``images/img*.nii`` and ``labels/seg*.nii`` pair by number.
    ``by`` is a regular expression instead, whose groups are compared, or ``order``; the user knows
    it as ``setting``. Raises unless every file has exactly one partner.
    """
    has_pattern = any(file.wild for file in (*files, *others))
    if by == BY_ORDER or (len(files) == len(others) == 1 and not has_pattern):
        if len(files) != len(others):
            raise ConfigError(
                f"{len(others)} files of {name!r} cannot be put beside {len(files)} in their "
                "order: as many were expected"
            )
        return [other.path for other in others]
    ways = [_stem, lambda file: file.wild or None] if by is None else [_groups(by, setting)]
    tries = [_Pairs.made(files, others, way) for way in ways]
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


Key = tuple[str, ...] | None
Way = Callable[[NamedFile], Key]


def _stem(file: NamedFile) -> Key:
    """The name without the suffix of its format."""
    suffix = suffix_of(file.path)
    return (file.path.name[: -len(suffix)] if suffix else file.path.stem,)


def _groups(by: str, setting: str) -> Way:
    try:
        expression = re.compile(by)
    except re.error as error:
        raise ConfigError(f"{setting} = {by!r} is not a regular expression: {error}") from error
    if not expression.groups:
        raise ConfigError(
            f"{setting} = {by!r} has no group: put what names have in common into parentheses, "
            rf"such as '(\d+)', or use {BY_ORDER!r}"
        )

    def groups(file: NamedFile) -> Key:
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
    def made(cls, files: Sequence[NamedFile], others: Sequence[NamedFile], way: Way) -> _Pairs:
        mine, theirs = _by_key(files, way), _by_key(others, way)
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


def _by_key(files: Sequence[NamedFile], way: Way) -> dict[tuple[str, ...], list[Path]]:
    found: dict[tuple[str, ...], list[Path]] = {}
    for file in files:
        if (key := way(file)) is not None:
            found.setdefault(key, []).append(file.path)
    return found


def _listed(paths: Sequence[Path]) -> str:
    return listed([f"{path.parent.name}/{path.name}" for path in paths])


def listed(words: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = f" and {len(words) - MAX_LISTED} more" if len(words) > MAX_LISTED else ""
    return ", ".join(words[:MAX_LISTED]) + more
