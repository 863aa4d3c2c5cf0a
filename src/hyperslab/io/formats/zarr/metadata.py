"""What the metadata of a Zarr array says, in one form for both versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.formats.zarr.pipeline import Pipeline

MAX_EXTENT = 2**63 - 1

AXES = {
    **dict.fromkeys(("n", "sample", "samples", "batch"), "N"),
    **dict.fromkeys(("c", "channel", "channels"), "C"),
    **dict.fromkeys(("z", "d", "depth"), "D"),
    **dict.fromkeys(("y", "h", "height"), "H"),
    **dict.fromkeys(("x", "w", "width"), "W"),
}
"""The letters of dims, by the names that people give them."""


@dataclass(frozen=True)
class KeyEncoding:
    """How the file of a chunk is called."""

    prefix: str
    separator: str

    def path(self, position: Sequence[int]) -> str:
        """Relative to the array's directory.

        >>> KeyEncoding("c", "/").path((1, 0)), KeyEncoding("", ".").path((1, 0))
        ('c/1/0', '1.0')
        """
        parts = [self.prefix] if self.prefix else []
        return self.separator.join([*parts, *map(str, position)]) or "0"


@dataclass(frozen=True)
class Sharding:
    """Files that hold many chunks and, at one end, an index of them."""

    chunk_shape: tuple[int, ...]
    """Of the chunks inside; it divides that of the shard."""
    index_is_last: bool
    index_dtype: np.dtype[Any]
    index_has_crc: bool


@dataclass(frozen=True)
class ArrayMetadata:
    """All that is needed to read an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """As stored."""
    chunk_shape: tuple[int, ...]
    """Of what a file holds."""
    keys: KeyEncoding
    fill_value: Any
    pipeline: Pipeline
    """For a chunk; with shards, for one inside."""
    sharding: Sharding | None
    axes: str | None


def extents(value: object, what: str, *, least: int, ndim: int | None = None) -> tuple[int, ...]:
    """``value`` as a tuple of extents, once it is sure that it is one."""
    if not isinstance(value, list) or not all(_is_extent(item, least) for item in value):
        raise FormatError(f"damaged: its {what} is {_short(value)}")
    if ndim not in (None, len(value)):
        raise FormatError(f"damaged: its {what} is {_short(value)}, and it has {ndim} dims")
    return tuple(value)


def check_size(shape: Sequence[int], dtype: np.dtype[Any], what: str) -> None:
    """Raises unless so many bytes can be counted, at least."""
    if math.prod(shape) * dtype.itemsize > MAX_EXTENT:
        raise FormatError(f"damaged: its {what} is {_short(list(shape))}")


def axes_hint(names: object, ndim: int) -> str | None:
    """The letters of dims called ``names``, where all of them are known."""
    if not isinstance(names, Iterable):
        return None
    letters = [AXES.get(name.lower(), "") if isinstance(name, str) else "" for name in names]
    whole = len(letters) == ndim == len(set(letters)) and "" not in letters
    if not whole or "N" in letters[1:] or letters == ["N"]:
        return None
    return "".join(letters)


def _is_extent(item: object, least: int) -> bool:
    return type(item) is int and least <= item <= MAX_EXTENT


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
