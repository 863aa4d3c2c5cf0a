"""Files of bare numbers: whoever opens one says what they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.npy import NAME, check_dtype, check_names
from hyperslab.io.reader import ArrayReader, Format


class Raw(Format):
    """Files that hold an array and nothing else, but for a header that ``offset`` skips."""

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
        dtype: DTypeLike,
        shape: int | Sequence[int],
        offset: int = 0,
        order: str = "C",
    ) -> list[ArrayReader]:
        """A reader of the array of ``shape`` that begins at byte ``offset``.

        ``dtype`` says the byte order too, such as ``>f4``. The first extent of ``shape`` may be -1:
        it is then as large as the file. ``order`` is ``C``, or ``F`` if the first dim varies
        fastest.
        """
        check_names(path, names)
        file = DataFile.look_at(path)
        stored = _dtype(path, dtype)
        if order not in ("C", "F"):
            raise ConfigError(f"order {order!r} is not known: 'C', or 'F' for Fortran's")
        (start,) = _whole_numbers("offset", offset)
        if start < 0:
            raise ConfigError(f"offset must not be negative, got {start}")
        extents = _fitted(file, stored, _whole_numbers("shape", shape), start)
        return [ContiguousArray(file, start, extents, stored, fortran=order == "F") for _ in names]


def _dtype(path: Path, given: DTypeLike) -> np.dtype[Any]:
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"dtype {given!r} is not known: such as 'int16', or '>f4'") from error
    check_dtype(path, dtype)
    return dtype


def _whole_numbers(what: str, given: int | Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, given if isinstance(given, Iterable) else (given,)))
    except TypeError as error:
        raise ConfigError(f"{what} {given!r} is not made of whole numbers") from error


def _fitted(
    file: DataFile, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> tuple[int, ...]:
    """The shape that was given, once it is sure that the file has just that many bytes."""
    first, rest = shape[:1], shape[1:]
    if min(first, default=0) < -1 or min(rest, default=0) < 0:
        raise ConfigError(f"shape {shape} has a negative extent; only the first may be -1")
    one = math.prod(rest) * dtype.itemsize
    found = file.size - offset
    if first == (-1,):
        if found < 0 or not one or found % one:
            raise FormatError(
                f"{file.path} has {found} bytes from byte {offset} on, which is no whole number of "
                f"items of {dtype} {rest} ({one} bytes each): check dtype, shape and offset"
            )
        return (found // one, *rest)
    if found != (wanted := math.prod(first) * one):
        off = f"{wanted - found} are missing" if found < wanted else f"{found - wanted} too many"
        raise FormatError(
            f"{file.path} has {found} bytes from byte {offset} on, and an array of {dtype} {shape} "
            f"has {wanted}: {off}; check dtype, shape and offset (a first extent of -1 is read off "
            "the file)"
        )
    return shape
