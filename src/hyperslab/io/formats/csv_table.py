"""Tables as text: a row a sample, columns of numbers, and one that names the samples."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError, listed
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.npy import NAME, check_names
from hyperslab.io.reader import ArrayReader, Format, Storage
from hyperslab.layout import Box

SUFFIXES = (".csv", ".tsv")
DELIMITERS = ",;\t"
MAX_NBYTES = 1 << 30
"""A table of this size is none of targets."""


@dataclass(frozen=True)
class CsvFile:
    """The cells of a table, as text."""

    path: Path
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    """Of the file, in which each row ends."""

    @classmethod
    def read(cls, path: Path) -> CsvFile:
        """Separated by commas, semicolons or tabs; the first line has the names of the columns."""
        header, *rows = _lines(path)
        names = tuple(cell.strip() for cell in header[1])
        if len(set(names)) < len(names):
            doubled = sorted({name for name in names if names.count(name) > 1})
            raise FormatError(f"{path} has several columns called {', '.join(map(repr, doubled))}")
        if all(map(_is_number, names)):
            raise FormatError(
                f"{path} begins with numbers ({', '.join(names)}): its first line must have the "
                "names of the columns"
            )
        odd = [f"line {line} has {len(cells)}" for line, cells in rows if len(cells) != len(names)]
        if odd:
            raise FormatError(
                f"{path} has {len(names)} columns ({', '.join(names)}), but {listed(odd)} cells"
            )
        cells = tuple(tuple(cell.strip() for cell in row) for _, row in rows)
        return cls(path, names, cells, tuple(line for line, _ in rows))

    def column(self, name: str) -> list[str]:
        return [row[self.place(name)] for row in self.rows]

    def place(self, name: str) -> int:
        if name not in self.header:
            raise FormatError(
                f"{self.path} has no column {name!r}: it has {listed([*map(repr, self.header)])}"
            )
        return self.header.index(name)

    def numbers(self, columns: str | Sequence[str]) -> NDArray[Any]:
        """(rows, columns) as float64, or the numbers of one column, as int64 if all are whole."""
        if isinstance(columns, str):
            values = self.numbers([columns])[:, 0]
            is_whole = all(
                "." not in text and "e" not in text.lower() for text in self.column(columns)
            )
            return values.astype(np.int64) if is_whole else values
        places = [self.place(name) for name in columns]
        cells = [[row[place] for place in places] for row in self.rows]
        odd = [
            f"{text!r} in column {name!r} of line {line}"
            for line, row in zip(self.lines, cells, strict=True)
            for name, text in zip(columns, row, strict=True)
            if not _is_number(text)
        ]
        if odd:
            raise FormatError(
                f"{self.path} has {len(odd)} of {len(cells) * len(columns)} cells that are no "
                f"finite numbers: {listed(odd)}"
            )
        return np.array([[float(text) for text in row] for row in cells], np.float64)


class CsvTable(Format):
    """One array called ``data``: the numbers of the ``columns``, a row a line.

    ``columns`` is a list, or one name, which gives a number a row rather than a vector of one.
    Left out, they are all but the first, which names the samples.
    """

    @classmethod
    def names(cls, path: Path, **_: Any) -> Sequence[str]:
        DataFile.look_at(path)
        return [NAME]

    @classmethod
    def open(  # type: ignore[override]
        cls, path: Path, names: Sequence[str], *, columns: str | Sequence[str] | None = None
    ) -> list[ArrayReader]:
        check_names(path, names)
        table = CsvFile.read(path)
        return [ValuesArray(table.numbers(columns_of(table, columns)), "text")]


def columns_of(
    table: CsvFile, columns: str | Sequence[str] | None, key: str | None = None
) -> str | Sequence[str]:
    """Those asked for, or all but ``key``, which is the first if not given."""
    if columns is None:
        key = key or table.header[0]
        columns = [name for name in table.header if name != key]
    if not columns:
        raise FormatError(f"{table.path} has no columns of numbers beside {table.header[0]!r}")
    return columns


class ValuesArray(ArrayReader):
    """Rows of numbers that were read with their file."""

    axes = "N"

    def __init__(self, values: NDArray[Any], kind: str) -> None:
        self._values, self._kind = values, kind
        self.shape, self.dtype = values.shape, values.dtype

    def read(self, box: Box, out: NDArray[Any]) -> None:
        out[...] = self._values[tuple(slice(*span) for span in box.spans)]

    def storage(self) -> Storage:
        return Storage(kind=self._kind, nbytes=self._values.nbytes)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Lines that are not empty, with their numbers; the first has the names of the columns."""
    file = DataFile.look_at(path)
    if file.size > MAX_NBYTES:
        raise FormatError(f"{path} has {file.size} bytes, which is too much for a table of targets")
    try:
        text = bytes(file.read(0, file.size)).decode("utf-8-sig")
        first = text.partition("\n")[0]
        reader = csv.reader(
            io.StringIO(text, newline=""), delimiter=max(DELIMITERS, key=first.count), strict=True
        )
        found = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is no text in UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise FormatError(f"{path} is no table of comma-separated values: {error}") from error
    if len(found) < 2:
        raise FormatError(f"{path} has no rows: a line with names of columns, and rows, are needed")
    return found


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and "_" not in text
    except ValueError:
        return False
