"""Arrays that lie in one piece in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.box_copy import MAX_THREADS, BoxCopy, strides_of
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.read_ahead import Range, RangeReader
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.layout import Box
from hyperslab.trace import active


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
        self._strides = strides_of(self.shape[::-1] if fortran else self.shape, self._stored)
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
        if not out.size:
            return
        with self._file.opened() as fd:
            stop = self._offset + self._storage.nbytes
            read_box(self._file, fd, self._copy_of(box, out), stop)

    def _copy_of(self, box: Box, out: NDArray[Any]) -> BoxCopy:
        starts = [start for start, _ in box.spans]
        if self._fortran:
            starts, out = starts[::-1], out.T
        return BoxCopy.of(self._offset, self._stored, self._strides, starts, out)


def read_box(
    file: DataFile, fd: int, copy: BoxCopy, stop: int, max_threads: int = MAX_THREADS
) -> None:
    """Copies a box out of an array that ends at byte ``stop`` of a file."""

    def ranges() -> Iterator[Range] | None:
        # The rest of an array is left to the kernel, which has nothing else to read ahead.
        return None if copy.is_all_until(stop) else copy.ranges()

    with active.reading(file.path, copy.out.nbytes):
        copy.run(RangeReader(file, fd, ranges), max_threads)
