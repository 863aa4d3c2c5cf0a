"""NumPy's own files: one array each, in one piece."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from hyperslab.errors import FormatError
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.threads import ForkSafeLock
from hyperslab.io.reader import ArrayReader, Format

NAME = "data"
"""What the one array of a file is called; in the file it has no name."""

HEADER_NBYTES = 1 << 17
"""More than any header that NumPy writes, or would read without being told that it is safe."""

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]

_HEADER_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError),
    *(SyntaxError, tokenize.TokenError, RecursionError, MemoryError),
    Warning,  # where warnings are errors
)
"""What evaluating a damaged header may raise."""

_EVALUATES = ForkSafeLock()
"""One thread evaluates at a time: `ast` of Python 3.11 counts the depth of all of them as one."""


class Npy(Format):
    """``.npy`` files of versions 1 to 3, C or Fortran order, either byte order."""

    @classmethod
    def names(cls, path: Path) -> Sequence[str]:  # type: ignore[override]
        DataFile.look_at(path)
        return [NAME]

    @classmethod
    def open(cls, path: Path, names: Sequence[str]) -> list[ArrayReader]:  # type: ignore[override]
        check_names(path, names)
        file = DataFile.look_at(path)
        stream = io.BytesIO(file.read(0, min(file.size, HEADER_NBYTES)))
        shape, fortran, dtype = _header(path, stream)
        check_dtype(path, dtype)
        stop = stream.tell() + math.prod(shape) * dtype.itemsize
        note = f"{file.size - stop} bytes follow the array" if file.size > stop else None
        return [
            ContiguousArray(file, stream.tell(), shape, dtype, fortran=fortran, note=note)
            for _ in names
        ]


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raises if an array is asked for that a file of one array without a name does not have."""
    if unknown := [name for name in names if name != NAME]:
        raise FormatError(
            f"{path} has no array {unknown[0]!r}: it holds one array, which is called {NAME!r}"
        )


def check_dtype(path: Path, dtype: np.dtype[Any]) -> None:
    """Raises unless ``dtype`` is one of numbers."""
    if dtype.kind not in "biufc":
        what = {"O": "Python objects", "V": "records or raw bytes"}.get(dtype.kind, "no numbers")
        raise FormatError(
            f"{path} holds {what} (dtype {dtype}), which cannot be cut and trained on: save an "
            "array of numbers by itself"
        )


def _header(path: Path, stream: BinaryIO) -> Header:
    try:
        version = npy_format.read_magic(stream)
        with _EVALUATES:
            if version == (1, 0):
                return npy_format.read_array_header_1_0(stream)
            if version in ((2, 0), (3, 0)):  # alike, but for names of fields, which we refuse
                return npy_format.read_array_header_2_0(stream)
    except _HEADER_ERRORS as error:
        reason = str(error).partition("\n")[0][:200]
        raise FormatError(
            f"{path} is not a .npy file, or its header is damaged: {reason}"
        ) from error
    raise FormatError(f"{path} is of .npy version {version}: versions 1 to 3 can be read")
