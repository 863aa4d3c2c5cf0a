"""What reading boxes costs, by how arrays lie on disk: one box, or those of all ranks of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hyperslab.io.dataset import Dataset, rank_boxes
from hyperslab.io.engine.box_copy import DIRECT_NBYTES
from hyperslab.io.engine.read_ahead import GAP_NBYTES
from hyperslab.io.info.describe import nbytes_of
from hyperslab.io.reader import ArrayReader
from hyperslab.io.spec import check_cuts, shown_shape
from hyperslab.io.tiled import TiledArray, untiled
from hyperslab.layout import Box, Grid
from hyperslab.partial import shown_nbytes

MAX_AMPLIFICATION = 1.25
SMALL_NBYTES = 16 << 10
"""Chunks below this cost more by their number than by their bytes."""
MANY_READS = 1000
FREE_NBYTES = 1 << 16
"""To read or decode so little takes no longer than to read less."""
LARGE_NBYTES = 64 << 20
"""Chunks above this are slow to begin with, and no two threads can share one."""


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
        return sum((read_cost(reader.whole, part) for part in reader.parts(box)), NOTHING)
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


@dataclass(frozen=True)
class RankReads:
    """What one rank reads of one sample."""

    rank: int
    box: Box
    """Of the sample itself, channels first."""
    cost: ReadCost
    """Of all arrays together."""


@dataclass(frozen=True)
class MeshReads:
    """What all ranks read of one sample."""

    grid: Grid
    ranks: tuple[RankReads, ...]

    def spread(self, value: Callable[[ReadCost], float]) -> tuple[float, float, float]:
        """The least, the mean and the most over the ranks."""
        values = [value(each.cost) for each in self.ranks]
        return min(values), sum(values) / len(values), max(values)

    @property
    def worst(self) -> RankReads:
        return max(self.ranks, key=lambda each: each.cost.amplification)


def mesh_reads(dataset: Dataset, grid: Grid, index: int = 0) -> MeshReads:
    """What each rank of ``grid`` reads of sample ``index``."""
    check_cuts(dataset.spec, grid)
    manifest = dataset.manifest
    numbers = {name: manifest.place(index, manifest.columns[name][0])[1] for name in dataset.arrays}
    ranks = []
    for rank in range(grid.num_ranks):
        boxes = rank_boxes(dataset, grid, [rank])
        costs = [
            read_cost(dataset.reader(index, name), spec.axes.file_box(numbers[name], boxes[name]))
            for name, spec in dataset.arrays.items()
        ]
        ranks.append(RankReads(rank, boxes[dataset.spec.name], sum(costs, NOTHING)))
    return MeshReads(grid, tuple(ranks))


def find_trouble(dataset: Dataset, reads: MeshReads | None, index: int = 0) -> list[str]:
    """What makes reading boxes slow, in words; all of it is mended by rewriting the files."""
    found = []
    for name, spec in dataset.arrays.items():
        storage = untiled(dataset.reader(index, name)).storage()
        chunk = math.prod(storage.chunks or ()) * spec.dtype.itemsize
        shown = f"{name} is in chunks of {shown_shape(storage.chunks or ())}"
        if not storage.is_seekable:
            found.append(
                f"{name} is compressed as a whole ({storage.compression}): a rank that wants a box "
                "of it must inflate what comes before"
            )
        elif storage.chunks and spec.is_cut and chunk > LARGE_NBYTES:
            found.append(f"{shown}, {shown_nbytes(chunk)} each: any box decodes all of one")
        elif storage.chunks and chunk < SMALL_NBYTES and spec.nbytes > MANY_READS * chunk:
            found.append(
                f"{shown}, {shown_nbytes(chunk)} each: a sample takes about "
                f"{math.ceil(spec.nbytes / chunk)} small reads"
            )
    cost = reads.worst.cost if reads else NOTHING
    if reads and cost.amplification > MAX_AMPLIFICATION and cost.touched_nbytes > FREE_NBYTES:
        found.append(
            f"on the mesh {reads.grid.describe()}, rank {reads.worst.rank} must read or decode "
            f"{shown_nbytes(cost.touched_nbytes)} to get {shown_nbytes(cost.wanted_nbytes)} "
            f"({cost.amplification:.1f} times as much)"
        )
    return found
