"""Arrays in one piece in a file that is compressed as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.inflated import MAX_RATIO, inflated
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.layout import Box, Span

RUN_NBYTES = 4 * 2**20
"""Inflated at a time, to take a part of the box out of it."""


class StreamedArray(ArrayReader):
    """An array of ``shape`` whose bytes begin at ``offset`` inside the gzip file ``file``.

    ``dtype`` is that of the file, of either byte order; ``fortran`` says that the first dim varies
    fastest. A read passes through the file up to the box's end, and keeps only the box.
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
    ) -> None:
        self._file, self._offset = file, offset
        self._stored = np.dtype(dtype)
        self._fortran = fortran
        self.shape = tuple(shape)
        self.dtype = self._stored.newbyteorder("=")
        self.axes = axes
        end = offset + math.prod(self.shape) * self._stored.itemsize
        if end > file.size * MAX_RATIO:
            raise FormatError(
                f"{file.path} is truncated or damaged: its array of {self.dtype} {self.shape} "
                f"would end at byte {end}, more than its {file.size} compressed bytes can hold"
            )

    def storage(self) -> Storage:
        return Storage(
            kind="contiguous",
            nbytes=self._file.size,
            compression="gzip",
            fortran=self._fortran,
            note="gzip around the whole file: every box inflates all that comes before it",
        )

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not box:
            return
        shape, spans = self.shape, box.spans
        if self._fortran:
            shape, spans, out = shape[::-1], spans[::-1], out.T
        runs = list(_runs(shape, spans, self._stored.itemsize))
        with inflated(self._file).opened(self._offset + runs[0].start) as stream:
            for run in runs:
                stream.skip(self._offset + run.start - stream.position)
                rows = np.empty(run.shape, self._stored)
                stream.read_into(rows.reshape(-1).view(np.uint8).data)
                out[run.place] = rows[run.part]


class _Run(NamedTuple):
    """Neighbouring bytes of an array in C order, and the part of a box that is in them."""

    start: int
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    """Of the box, in an array of ``shape``."""
    place: tuple[int | slice, ...]
    """Of that part, in the box."""


def _runs(shape: tuple[int, ...], spans: tuple[Span, ...], itemsize: int) -> Iterator[_Run]:
    """The runs that hold the box of ``spans``, in the order of the array.

    A run is some whole rows along the first dim whose rows are small enough.
    """
    if not shape:
        yield _Run(0, (), (), ())
        return
    row_nbytes = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    dim = next(dim for dim, nbytes in enumerate(row_nbytes) if nbytes <= RUN_NBYTES)
    step = max(1, RUN_NBYTES // row_nbytes[dim])
    part = (slice(None), *(slice(*span) for span in spans[dim + 1 :]))
    for lead in product(*(range(*span) for span in spans[:dim])):
        before = sum(place * nbytes for place, nbytes in zip(lead, row_nbytes, strict=False))
        inside = tuple(place - span.start for place, span in zip(lead, spans, strict=False))
        for first in range(*spans[dim], step):
            rows = Span(first, min(first + step, spans[dim].stop))
            yield _Run(
                before + first * row_nbytes[dim],
                (rows.size, *shape[dim + 1 :]),
                part,
                (*inside, rows.slice_from(spans[dim].start)),
            )
