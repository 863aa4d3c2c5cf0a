"""A large box as small ones, for work in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hyperslab.io.reader import ArrayReader
from hyperslab.layout import Box, Span


def tiles(box: Box, grain: Sequence[int], max_numel: int, dim: int = 0) -> Iterator[Box]:
    """Boxes in row-major order that together are ``box``.

    They have at most ``max_numel`` elements where they can: cuts fall on multiples of ``grain``.

    >>> [tile.spans[0] for tile in tiles(Box.of((1, 6), (0, 3)), (2, 3), max_numel=6)]
    [Span(start=1, stop=2), Span(start=2, stop=4), Span(start=4, stop=6)]
    """
    if box.numel <= max_numel or dim == len(box.spans):
        yield box
        return
    span = box.spans[dim]
    row = box.numel // span.size * grain[dim]
    step = grain[dim] * max(1, max_numel // row)
    for start in range(span.start // step * step, span.stop, step):
        part = box.with_span(dim, span & Span(start, start + step))
        yield from tiles(part, grain, max_numel, dim + 1)


def grain_of(reader: ArrayReader) -> tuple[int, ...]:
    """What is best read at once: a chunk, a record, all of a gzipped file.

    Boxes come in row-major order, so that is all of an array in Fortran's order, too.
    """
    storage = reader.storage()
    if storage.chunks is not None:
        return storage.chunks
    whole = tuple(max(1, extent) for extent in reader.shape)
    if storage.kind == "records":
        return (1, *whole[1:])
    return (1,) * len(whole) if storage.is_seekable and not storage.fortran else whole


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The pieces of ``box`` that lie in one run in an array of ``shape``, in row-major order.

    Each is an index into the box's first dims, and the position of its first element.

    >>> list(runs(Box.of((0, 2), (4, 6), (0, 3)), (2, 8, 3)))
    [((0,), 12), ((1,), 36)]
    """
    looped = len(shape)
    while looped and box.spans[looped - 1] == (0, shape[looped - 1]):
        looped -= 1
    looped = max(0, looped - 1)
    strides = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
    first = sum(span.start * stride for span, stride in zip(box.spans, strides, strict=True))
    for index in np.ndindex(*box.shape[:looped]):
        yield index, first + sum(i * stride for i, stride in zip(index, strides, strict=False))
