"""Where the chunks of a dataset lie in its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import ge

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.chunked import Chunk
from hyperslab.io.engine.files import DataFile

ALL_SKIPPED = 0xFFFFFFFF


class ChunkIndex:
    """Finds a chunk by its place in the grid; made of the rows of ``child.describe``."""

    def __init__(
        self,
        file: DataFile,
        shape: Sequence[int],
        chunk_shape: Sequence[int],
        rows: NDArray[np.int64],
        *,
        is_edge_unfiltered: bool = False,
    ) -> None:
        self._file = file
        self._grid = [-(-extent // n) for extent, n in zip(shape, chunk_shape, strict=True)]
        # A chunk whose place is not full of elements; those at the upper edges may be.
        self._full = [extent // n for extent, n in zip(shape, chunk_shape, strict=True)]
        self._is_edge_unfiltered = is_edge_unfiltered
        if math.prod(self._grid) >= 2**63:
            raise FormatError(f"{file.path} is damaged: it has a grid of {self._grid} chunks")
        numbers = self._numbers(rows[:, : len(self._grid)], chunk_shape)
        order = np.argsort(numbers)
        self._numbers_of_rows = numbers[order]
        self._rows = rows[order, -3:]
        if (np.diff(self._numbers_of_rows) == 0).any():
            raise FormatError(f"{file.path} is damaged: a chunk is there twice")

    def find(self, position: tuple[int, ...]) -> Chunk | None:
        number = self._number(position)
        row = int(self._numbers_of_rows.searchsorted(number))
        if row == len(self._rows) or self._numbers_of_rows[row] != number:
            return None
        mask, offset, nbytes = self._rows[row].tolist()
        if self._is_edge_unfiltered and any(map(ge, position, self._full)):
            mask = ALL_SKIPPED
        return Chunk(self._file, offset, nbytes, mask)

    def _number(self, position: tuple[int, ...]) -> int:
        number = 0
        for place, extent in zip(position, self._grid, strict=True):
            number = number * extent + place
        return number

    def _numbers(self, starts: NDArray[np.int64], chunk_shape: Sequence[int]) -> NDArray[np.int64]:
        """The number in the grid of each chunk, from its first element."""
        places, rest = np.divmod(starts, np.asarray(chunk_shape, np.int64))
        if rest.any() or (places < 0).any() or (places >= self._grid).any():
            raise FormatError(f"{self._file.path} is damaged: a chunk lies outside its dataset")
        numbers = np.zeros(len(starts), np.int64)
        for place, extent in zip(places.T, self._grid, strict=True):
            numbers = numbers * extent + place
        return numbers
