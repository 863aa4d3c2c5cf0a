"""Files by their names: those of a list, of a pattern, of a folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.manifest import SourceFile
from hyperslab.io.pairing import named_by
from hyperslab.io.reader import format_of, suffix_of

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str] | SourceFile]
"""What users name; files that were found already are given as they are."""


def find_files(paths: Paths) -> list[Path]:
    """The files that ``paths`` name, with every pattern replaced by what fits it.

    A folder stands for the files of samples in it.
    """
    return [file.path for file in find_named_files(paths)]


def find_named_files(paths: Paths, format: str | None = None) -> list[SourceFile]:
    """The same, with what the wildcards of a pattern stand for in each name.

    With a ``format`` a folder stands for itself: there are formats of folders.
    """
    found: list[SourceFile] = []
    for path in listed_paths(paths):
        if isinstance(path, SourceFile):
            found.append(path)
            continue
        text = path_text(path)
        matches = [SourceFile(Path(text))]
        if format is None and _is_folder(text):
            matches = _files_of(Path(text))
        elif glob.has_magic(text) and not Path(text).exists():
            names = sorted(glob.iglob(text, recursive=True))  # noqa: PTH207 - absolute too
            matches = [named_by(name, text) for name in names]
        if not matches:
            raise FormatError(f"no file fits {text!r} (looked from {Path.cwd()})")
        found += matches
    if not found:
        raise ConfigError("no files were given: name one, or a pattern such as 'cosmo/*.h5'")
    return found


def absolute(files: Iterable[SourceFile]) -> list[SourceFile]:
    """The same files wherever the process goes later."""
    return [
        file if file.path.is_absolute() else replace(file, path=file.path.absolute())
        for file in files
    ]


def _files_of(folder: Path) -> list[SourceFile]:
    """Those of one format in a folder; tables beside them hold targets, not samples."""
    by_format: dict[str, list[SourceFile]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if not path.name.startswith(".") and suffix_of(path):
            by_format.setdefault(format_of(path), []).append(SourceFile(path, (path.name,)))
    by_format = {name: found for name, found in by_format.items() if name != "csv"} or by_format
    if len(by_format) != 1:
        counts = ", ".join(f"{len(found)} of {name}" for name, found in by_format.items())
        has = f"files of several formats ({counts})" if counts else "no files of a known format"
        raise FormatError(
            f"{folder} has {has}: name those of one format, by a pattern such as 'cosmo/*.h5'"
        )
    return next(iter(by_format.values()))


def path_text(path: object) -> str:
    """A path as text; raises for what is none."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} names no file: give a path or a pattern, or several")
    return text


def is_pattern(path: object) -> bool:
    """Whether more files may be found by it later."""
    if isinstance(path, SourceFile):
        return False
    text = path_text(path)
    return _is_folder(text) or (glob.has_magic(text) and not Path(text).exists())


def _is_folder(text: str) -> bool:
    """Of files, not a file that is a folder."""
    return Path(text).is_dir() and not suffix_of(Path(text))


def listed_paths(paths: Paths) -> list[Any]:
    """One path or several, as a list."""
    return list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
