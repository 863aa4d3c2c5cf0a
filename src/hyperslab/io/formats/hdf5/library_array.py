"""Datasets that only the HDF5 library can read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import DataFile
from hyperslab.io.formats.hdf5.library import library
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.layout import Box, Span

PIECE_NBYTES = 32 * 2**20
"""What is asked for at once."""


class LibraryArray(ArrayReader):
    """Dataset ``name`` of the HDF5 file ``path``, which takes its data from ``files``.

    Unless ``external``, these must be that file alone.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        files: Sequence[DataFile],
        shape: Sequence[int],
        dtype: np.dtype[Any],
        storage: Storage,
        *,
        external: bool,
    ) -> None:
        self._path, self._name, self._files = path.absolute(), name, tuple(files)
        self._external = external
        self.shape = tuple(shape)
        self.dtype = dtype.newbyteorder("=")
        self._storage = storage

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        with ExitStack() as stack:
            for file in self._files:
                stack.enter_context(file.opened())  # raises if one has changed
            for piece in pieces(box, PIECE_NBYTES // self.dtype.itemsize):
                place: tuple[Any, ...] = (..., *piece.slices_in(box))
                out[place] = self._read_piece(piece)

    def _read_piece(self, box: Box) -> NDArray[Any]:
        what = {"name": self._name, "box": list(box.spans), "external": self._external}
        _, blob = library.ask("read", self._path, **what)
        if blob.nbytes != box.numel * self.dtype.itemsize:
            raise FormatError(f"{self._path} has changed since it was opened")
        return blob.view(self.dtype).reshape(box.shape)


def pieces(box: Box, max_numel: int) -> Iterator[Box]:
    """Boxes that cover ``box`` in order, each of at most ``max_numel`` elements, or of one.

    >>> [piece.shape for piece in pieces(Box.of((0, 3), (0, 4)), 8)]
    [(2, 4), (1, 4)]
    """
    if box.numel <= max_numel:
        yield from [box] if box else []
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    rest = math.prod(box.shape[dim + 1 :])
    step = max(1, max_numel // rest)
    start, stop = box.spans[dim]
    for at in range(start, stop, step):
        yield from pieces(box.with_span(dim, Span(at, min(stop, at + step))), max_numel)
