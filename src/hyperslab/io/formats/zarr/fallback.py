"""Arrays that only zarr-python can read."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import explained
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.layout import Box


class ForeignArray(ArrayReader):
    """The array in ``directory``, read by zarr-python because of ``reason``."""

    def __init__(self, directory: Path, reason: str) -> None:
        self._directory = directory
        self._array = _opened(directory, reason)
        self.shape = tuple(self._array.shape)
        self.dtype = np.dtype(self._array.dtype).newbyteorder("=")
        if self.dtype.kind not in "biufc":
            raise FormatError(f"{directory} has values of type {self.dtype}: numbers are read")
        _warn_once(reason)

    def storage(self) -> Storage:
        return Storage(
            kind="chunked",
            nbytes=stored_nbytes(self._directory),
            chunks=tuple(self._array.chunks),
            compression="unknown here",
            note="read by zarr-python, which is slower",
        )

    def read(self, box: Box, out: NDArray[Any]) -> None:
        try:
            out[...] = self._array[tuple(slice(*span) for span in box.spans)]
        except Exception as error:  # whatever a codec of others raises
            raise FormatError(
                f"{self._directory} cannot be read by zarr-python: {error}"
            ) from error


def stored_nbytes(directory: Path) -> int:
    """Of all files below ``directory``."""
    with explained(directory):
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _opened(directory: Path, reason: str) -> Any:
    try:
        import zarr
    except ImportError as error:
        raise FormatError(
            f"{directory} has {reason}, which is not read here: zarr-python may know it (pip "
            "install zarr)"
        ) from error
    try:
        with warnings.catch_warnings(action="ignore"):  # ours says enough
            return zarr.open_array(store=str(directory), mode="r")
    except Exception as error:  # whatever it makes of a damaged document
        raise FormatError(
            f"{directory} has {reason}, which neither hyperslab nor zarr-python knows: {error}"
        ) from error


@lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"Zarr arrays with {reason} are read by zarr-python, which is slower", stacklevel=2
    )
