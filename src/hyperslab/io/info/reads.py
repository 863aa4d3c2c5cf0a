"""What reading a box costs, by how the array lies on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import add

from hyperslab.io.engine.box_copy import DIRECT_NBYTES
from hyperslab.io.engine.read_ahead import GAP_NBYTES
from hyperslab.io.info.describe import nbytes_of
from hyperslab.io.reader import ArrayReader
from hyperslab.io.tiled import TiledArray
from hyperslab.layout import Box


@dataclass(frozen=True)
class ReadCost:
    """Of reading one box, or several."""

    wanted_nbytes: int
    disk_nbytes: int
    """Read from disk; an estimate where chunks are compressed, as if all were so alike."""
    touched_nbytes: int
    """Read or decoded to get at those wanted, not compressed."""
    num_reads: int

    @property
    def amplification(self) -> float:
        return self.touched_nbytes / self.wanted_nbytes if self.wanted_nbytes else 1.0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(
            self.wanted_nbytes + other.wanted_nbytes,
            self.disk_nbytes + other.disk_nbytes,
            self.touched_nbytes + other.touched_nbytes,
            self.num_reads + other.num_reads,
        )


NOTHING = ReadCost(0, 0, 0, 0)


def read_cost(reader: ArrayReader, box: Box) -> ReadCost:
    """The cost of reading ``box``, in the file's order of dims."""
    wanted = box.numel * reader.dtype.itemsize
    if not wanted:
        return NOTHING
    if isinstance(reader, TiledArray):
        return reduce(add, (read_cost(reader.whole, part) for part in reader.parts(box)))
    storage = reader.storage()
    if storage.chunks is not None:
        return _chunked(reader, box, storage.chunks, storage.nbytes)
    if not storage.is_seekable:
        return ReadCost(wanted, storage.nbytes, nbytes_of(reader), 1)
    return _contiguous(reader, box)


def num_chunks(box: Box, chunks: tuple[int, ...]) -> int:
    """How many chunks hold a part of ``box``."""
    return math.prod(
        -(-span.stop // length) - span.start // length
        for span, length in zip(box.spans, chunks, strict=True)
    )


def _chunked(reader: ArrayReader, box: Box, chunks: tuple[int, ...], nbytes: int) -> ReadCost:
    itemsize = reader.dtype.itemsize
    touched, total = num_chunks(box, chunks), num_chunks(Box.whole(reader.shape), chunks)
    return ReadCost(
        box.numel * itemsize,
        round(nbytes * touched / total),
        touched * math.prod(chunks) * itemsize,
        touched,
    )


def _contiguous(reader: ArrayReader, box: Box) -> ReadCost:
    """Runs that are long are read one by one, short ones together with the gaps between them."""
    wanted = box.numel * reader.dtype.itemsize
    cover = stride = reader.dtype.itemsize
    num, max_gap = 1, 0
    dims = list(zip(box.shape, reader.shape, strict=True))
    for size, extent in dims if reader.storage().fortran else reversed(dims):
        if stride - cover > max_gap and max_gap == 0:  # the run ends here
            max_gap = GAP_NBYTES if cover < DIRECT_NBYTES else -1
        if stride - cover <= max_gap and num == 1:
            cover += (size - 1) * stride
        else:
            num *= size
        stride *= extent
    return ReadCost(wanted, num * cover, num * cover, num)
