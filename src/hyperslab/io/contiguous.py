"""Arrays that lie in one piece in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import FormatError
from hyperslab.io.box_copy import BoxCopy, Dim, merged
from hyperslab.io.files import DataFile
from hyperslab.io.read_ahead import RangeReader
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
        self._file, self._offset, self._fortran = file, offset, fortran
        self._stored = np.dtype(dtype)
        self.shape = tuple(map(int, shape))
        self.dtype = self._stored.newbyteorder("=")
        self.axes = axes
        nbytes = math.prod(self.shape) * self._stored.itemsize
        self._storage = Storage(kind=storage_kind, nbytes=nbytes, fortran=fortran, note=note)
        self._check(offset, offset + nbytes)

    def _check(self, start: int, stop: int) -> None:
        what = f"array of {self.dtype} {self.shape}"
        if start < 0 or min(self.shape, default=0) < 0:
            raise FormatError(f"{self._file.path} is damaged: its {what} begins at byte {start}")
        if (missing := stop - self._file.size) > 0:
            raise FormatError(
                f"{self._file.path} is truncated: {missing} bytes are missing, as its {what} ends "
                f"at byte {stop} and the file has {self._file.size}"
            )

    def storage(self) -> Storage:
        return self._storage

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not box:
            return
        copy = self._copy_of(box, out)
        with self._file.opened() as fd:
            # The rest of an array is left to the kernel, which has nothing else to read ahead.
            is_rest = copy.is_all_until(self._offset + self._storage.nbytes)
            copy.run(RangeReader(self._file, fd, None if is_rest else copy.ranges))

    def _copy_of(self, box: Box, out: NDArray[Any]) -> BoxCopy:
        order = -1 if self._fortran else 1
        shape, spans = self.shape[::order], box.spans[::order]
        strides = [math.prod(shape[dim + 1 :]) * self._stored.itemsize for dim in range(len(shape))]
        starts = [span.start * stride for span, stride in zip(spans, strides, strict=True)]
        sizes = [span.size for span in spans]
        dims = map(Dim, sizes, strides, out.strides[::order])
        return BoxCopy(self._offset + sum(starts), self._stored, merged(dims), out)
