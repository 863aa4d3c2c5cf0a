"""Attributes of HDF5 files as an array: a few numbers a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.csv_table import ValuesArray
from hyperslab.io.formats.hdf5.library import library
from hyperslab.io.formats.npy import NAME, check_names
from hyperslab.io.reader import ArrayReader, Format


class Hdf5Attributes(Format):
    """One array called ``data``: one row, the numbers of the ``attributes``.

    They are a list, or one name, which gives a number rather than a vector of one.
    """

    @classmethod
    def names(cls, path: Path, **_: Any) -> Sequence[str]:
        DataFile.look_at(path)
        return [NAME]

    @classmethod
    def open(  # type: ignore[override]
        cls,
        path: Path,
        names: Sequence[str],
        *,
        attributes: str | Sequence[str],
        dtype: str | None = None,
    ) -> list[ArrayReader]:
        check_names(path, names)
        DataFile.look_at(path)
        wanted = [attributes] if isinstance(attributes, str) else list(attributes)
        answer, _ = library.ask("attributes", path, wanted=wanted)
        values = np.array([value for values in answer["values"] for value in values])
        if dtype is not None and not (values.astype(dtype) == values).all():
            raise FormatError(
                f"{path} has {values.tolist()} as attributes {wanted}, and {dtype} was expected, "
                "as in the first file"
            )
        row = values.astype(dtype or (np.int64 if values.dtype.kind in "biu" else np.float64))
        is_number = isinstance(attributes, str) and len(row) == 1
        return [ValuesArray(row if is_number else row[None], "attributes")]
