"""Bytes written and read back, and the files that are staged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from hyperslab.io.copying import Meter
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.files import DataFile, explained
from hyperslab.io.engine.tiles import grain_of, runs, tiles
from hyperslab.io.partial import WriteError, explained_writing, partial_file
from hyperslab.io.reader import ArrayReader
from hyperslab.io.spec import ArraySpec
from hyperslab.io.stage.unit import BLOCK_NBYTES, Unit, Written, shape_of
from hyperslab.layout import Box, Span

TILE_NBYTES = 64 << 20
PAGE_NBYTES = 4096
"""Data begins on a page of the file: reading it into a page-aligned buffer is 3 times as fast."""


class Run(NamedTuple):
    """Bytes as they were given to be written."""

    offset: int
    nbytes: int
    crc: int


class CheckedWriter:
    """Writes to ``fd``, and compares what the disk then holds with what was given."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path
        self._runs: list[Run] = []

    def write(self, data: memoryview, offset: int) -> None:
        done = 0
        with explained_writing(self._path):
            while done < len(data):
                done += os.pwrite(self._fd, data[done : done + BLOCK_NBYTES], offset + done)
        self._runs.append(Run(offset, len(data), crc32(data)))

    def verified(self) -> Written:
        """The size and the checksum of the file, read from the disk, not from memory."""
        os.fsync(self._fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer, whole, end = memoryview(bytearray(BLOCK_NBYTES)), 0, 0
        for run in sorted(self._runs):
            crc, end = 0, run.offset + run.nbytes
            for start in range(run.offset, end, BLOCK_NBYTES):
                block = buffer[: os.preadv(self._fd, [buffer[: end - start]], start)]
                crc, whole = crc32(block, crc), crc32(block, whole)
            if crc != run.crc:
                raise WriteError(
                    f"{self._path} does not hold what was written to it (bytes {run.offset} to "
                    f"{end}): the disk may be failing"
                )
        return Written(end, whole)


def copy_file(source: Path, target: Path, meter: Meter) -> Written:
    """Writes a copy of ``source``."""
    file = DataFile.look_at(source)
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with partial_file(target) as (_, fd):
        writer = CheckedWriter(fd, target)
        with file.opened() as source_fd:
            for start in range(0, file.size, BLOCK_NBYTES):
                block = buffer[: file.size - start]
                file.fill(source_fd, block, start)
                writer.write(block, start)
                meter.add(len(block))
        return writer.verified()


def write_array(
    dataset: Dataset, unit: Unit, spec: ArraySpec, target: Path, meter: Meter
) -> Written:
    """Writes the unit's box of an array of each of its samples, as one NPY file."""
    reader = dataset.reader(unit.index, spec.name)
    shape = shape_of(unit, spec)
    header = npy_header(shape, spec.dtype)
    with partial_file(target) as (_, fd):
        writer = CheckedWriter(fd, target)
        writer.write(memoryview(header), 0)
        for position, number in enumerate(unit.numbers):
            box = unit.boxes[spec.name]
            if spec.axes.stacked:
                box = Box((Span(number, number + 1), *box.spans))
            _write_box(reader, unit.path, box, writer, shape, position, len(header), meter)
        return writer.verified()


def _write_box(
    reader: ArrayReader,
    source: Path,
    box: Box,
    writer: CheckedWriter,
    shape: tuple[int, ...],
    position: int,
    offset: int,
    meter: Meter,
) -> None:
    """Writes ``box``, which comes ``position``-th along the first dim where samples are stacked."""
    itemsize = reader.dtype.itemsize
    origin = box if box.shape == shape else box.with_span(0, _before(box.spans[0], position))
    for tile in tiles(box, grain_of(reader), TILE_NBYTES // max(1, itemsize)):
        data = empty_aligned(tile.shape, reader.dtype)
        if tile:
            with explained(source):
                reader.read(tile, data)
        place = Box.of(*((part.start, part.stop) for part in tile.slices_in(origin)))
        for index, start in runs(place, shape):
            run = memoryview(data[index].reshape(-1).view(np.uint8))
            writer.write(run, offset + start * itemsize)
            meter.add(len(run))


def _before(span: Span, num: int) -> Span:
    return Span(span.start - num, span.stop - num)


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The head of an NPY file, filled up so that the data begins on a page."""
    fields = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    head = np.lib.format.magic(1, 0)
    text = repr(fields).encode("latin1")
    length = -(-(len(head) + 3 + len(text)) // PAGE_NBYTES) * PAGE_NBYTES - len(head) - 2
    return head + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
