"""Arrays that lie in one piece in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import FormatError
from hyperslab.io.buffers import empty_aligned
from hyperslab.io.files import DataFile
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.layout import Box


class ContiguousArray(ArrayReader):
    """An array of ``shape`` whose bytes begin at ``offset`` in ``file``.

    ``dtype`` is that of the file, of either byte order; ``fortran`` says that the first dim varies
    fastest.
    """

    def __init__(
        self,
        file: DataFile,
        offset: int,
        shape: Sequence[int],
        dtype: DTypeLike,
        *,
        fortran: bool = False,
        axes: str | None = None,
        storage_kind: str = "contiguous",
        note: str | None = None,
    ) -> None:
        self._file, self._offset = file, offset
        self._stored = np.dtype(dtype)
        self._fortran = fortran
        self.shape = tuple(shape)
        self.dtype = self._stored.newbyteorder("=")
        self.axes = axes
        self._nbytes = math.prod(self.shape) * self._stored.itemsize
        self._storage = Storage(kind=storage_kind, nbytes=self._nbytes, note=note)
        missing = offset + self._nbytes - file.size
        if missing > 0:
            raise FormatError(
                f"{file.path} is truncated: {missing} bytes are missing, as it has {file.size} and "
                f"its array of {self.dtype} {self.shape} ends at byte {offset + self._nbytes}"
            )

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not box:
            return
        shape, spans = self.shape, box.spans
        if self._fortran:
            shape, spans, out = shape[::-1], spans[::-1], out.T
        row = math.prod(shape[1:]) * self._stored.itemsize
        for index in range(spans[0].size) if shape else [0]:
            start = self._offset + (spans[0].start + index) * row if shape else self._offset
            whole = empty_aligned(shape[1:], self._stored)
            self._file.read_into(memoryview(whole.reshape(-1).view(np.uint8)), start)
            target = out[index : index + 1] if shape else out
            target[...] = whole[tuple(slice(*span) for span in spans[1:])]
