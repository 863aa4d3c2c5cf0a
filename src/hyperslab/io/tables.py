"""Targets that are rows of a table, or notes in the samples' own files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.io.formats.csv_table import CsvFile, columns_of
from hyperslab.io.formats.npy import NAME
from hyperslab.io.manifest import Manifest, Source, SourceFile, look_at_files
from hyperslab.io.pairing import BY_ORDER, BY_ROW, match_names
from hyperslab.io.reader import Opening
from hyperslab.io.schedule import Indices
from hyperslab.io.spec import row_spec

Columns = str | Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of a CSV file that belong to samples by name; see ``table``."""

    path: Path
    columns: Columns | None = None
    key: str | None = None

    def join_to(
        self, manifest: Manifest, name: str, by: str | os.PathLike[str] | None, *, setting: str
    ) -> tuple[Manifest, Indices]:
        """The table as a manifest of rows, and the row of each sample."""
        table = CsvFile.read(self.path)
        by_order = by in (BY_ORDER, BY_ROW)
        has_key = self.key is not None or not by_order
        columns = self.columns
        if columns is not None or has_key:
            columns = columns_of(table, columns, self.key)
        else:
            columns = table.header
        rows = _rows_of(self.path, _plain(columns), name)
        if by_order:
            return rows, self._in_order(manifest, len(rows), name)
        way = None if by is None else (os.fspath(by), setting)
        return rows, self._by_key(manifest, table, way)

    def _in_order(self, manifest: Manifest, num: int, name: str) -> Indices:
        if num != len(manifest):
            raise ConfigError(
                f"{num} rows of {self.path} cannot be put beside {len(manifest)} samples as "
                f"{name!r} in their order: as many were expected"
            )
        return np.arange(num)

    def _by_key(self, manifest: Manifest, table: CsvFile, by: tuple[str, str] | None) -> Indices:
        key = self.key or table.header[0]
        source = manifest.sources[0]
        if several := [file for file in source.files if file.num_rows != 1]:
            raise ConfigError(
                f"{self.path} names files, but {several[0].path} has {several[0].num_rows} "
                "samples: give a row to every sample, and say so by 'row'"
            )
        found = match_names(table.column(key), source.files, f"{self.path}, column {key!r}", by)
        return np.array(found, np.int64)[manifest.places[:, 0, 0]]


@dataclass(frozen=True)
class Attributes:
    """Attributes of the samples' own HDF5 files; see ``attributes``."""

    names: Columns

    def join_to(
        self, manifest: Manifest, name: str, by: str | os.PathLike[str] | None, *, setting: str
    ) -> tuple[Manifest, Indices]:
        """The notes as a manifest of the same files, and the file of each sample."""
        if by is not None:
            raise ConfigError(
                f"attributes belong to their own files: {setting} = {by!r} says nothing here"
            )
        source = manifest.sources[0]
        options = {"attributes": _plain(self.names)}
        (reader,) = Opening("hdf5-attributes", (NAME,), options)(source.files[0].path)
        opening = Opening("hdf5-attributes", (NAME,), {**options, "dtype": str(reader.dtype)})
        files = tuple([replace(file, num_rows=1, looks=()) for file in source.files])
        found = Manifest.of_files(Source(opening, (row_spec(name, reader),), files))
        return found, manifest.places[:, 0, 0]


def table(
    path: str | os.PathLike[str], columns: Columns | None = None, key: str | None = None
) -> Table:
    """Targets in a CSV file, for ``Dataset.beside``: a line a sample, below a line of names.

    Args:
        path: Cells are separated by commas, semicolons or tabs.
        columns: Those with the numbers; all but ``key``, if not given. One name gives one number a
            sample, such as a class, a list a vector.
        key: The column that names each sample's file, with or without folder and suffix, or by what
            the wildcards of its pattern stand for; the first, if not given.
    """
    return Table(Path(path).absolute(), columns, key)


def attributes(*names: str) -> Attributes:
    """Numbers that are attributes of the samples' HDF5 files, for ``Dataset.beside``.

    ``attributes("mass", "age")`` are those of the file itself, ``"galaxy@mass"`` one of the array
    or group ``galaxy``. Together they are one vector; one name alone gives the attribute as it is.
    """
    if not all(names) or not names:
        raise ConfigError("name an attribute at least, as in attributes('mass')")
    return Attributes(names[0] if len(names) == 1 else names)


def _rows_of(path: Path, columns: str | list[str], name: str) -> Manifest:
    """Every row of a table, under ``name``."""
    opening = Opening("csv", (NAME,), {"columns": columns})
    (reader,) = opening(path)
    files = look_at_files([SourceFile(path, num_rows=reader.shape[0])])
    return Manifest.of_files(Source(opening, (row_spec(name, reader),), files))


def _plain(columns: Columns) -> str | list[str]:
    return columns if isinstance(columns, str) else list(columns)
