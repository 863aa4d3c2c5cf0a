"""Staging: many files at once, each whole or not there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.copying import Meter, Progress, SourceIdentity, identities_of
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.files import DataFile, explained
from hyperslab.io.engine.tiles import grain_of, runs, tiles
from hyperslab.io.manifest import Source
from hyperslab.io.reader import ArrayReader
from hyperslab.io.spec import ArraySpec
from hyperslab.io.stage.unit import (
    BLOCK_NBYTES,
    Unit,
    Written,
    array_name,
    find_record,
    plan_units,
    remove_older,
    shape_of,
    write_record,
)
from hyperslab.layout import Box, Span
from hyperslab.partial import (
    WriteError,
    check_capacity,
    explained_writing,
    make_folder,
    partial_file,
    partial_nbytes,
    remove_leftovers,
)
from hyperslab.trace import Category, active

THREADS = 8
"""Files staged at once: a shared file system answers many requests faster than one."""
TILE_NBYTES = 64 << 20
"""Of an array that are held in memory at a time."""
PAGE_NBYTES = 4096
"""Data begins on a page of the file: reading it into a page-aligned buffer is 3 times as fast."""


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What was staged, and how fast."""

    directory: str
    num_files: int
    """Source files that were asked for."""
    num_staged: int
    """Of these, now."""
    num_kept: int
    """Of these, whole already."""
    failed: Mapping[str, str]
    """Files that could not be staged, with the reason."""
    nbytes: int
    """Written now."""
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_second": self.bandwidth}


def stage(
    dataset: Dataset,
    directory: str | Path,
    *,
    boxes: Mapping[str, Box] | None = None,
    samples: Sequence[int] | None = None,
    part: tuple[int, int] = (0, 1),
    threads: int = THREADS,
    verify: bool = False,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> StageReport:
    """Copies samples to ``directory``, from where ``open_staged`` reads them.

    A file of which all is needed is copied as it is; of others the boxes are written, not
    compressed. Every file is written under another name, read back from the disk, compared, and
    then renamed; what is whole already stays. Any number of processes may stage into one directory.

    Args:
        dataset: Where the samples are.
        directory: Is made if it is not there.
        boxes: By the name of the array, what is needed of each sample, channels first; arrays that
            are not named are needed whole.
        samples: Those needed; all, if left out.
        part: ``(i, n)`` stages the i-th of n shares, for n processes that share the work; what
            the others stage is there when they have returned.
        threads: Files staged at once.
        verify: Compares the checksums of files that are there already, not their sizes alone.
        skip_bad: Goes on after a file that cannot be read, and lists it in the report.
        progress: Is told how many bytes are done, and of how many.
    """
    number, num_parts = part
    if not 0 <= number < num_parts or threads < 1:
        raise ConfigError(f"part {part} is none, or {threads} threads are not enough")
    folder, began = Path(directory), time.perf_counter()
    paths = [file.path for file in dataset.manifest.all_files()]
    if folder.resolve() in {path.resolve().parent for path in paths}:
        raise ConfigError(f"{folder} has the files that are to be staged: name another directory")
    units = plan_units(dataset, boxes, samples)
    make_folder(folder)
    remove_leftovers([folder])
    remove_older(units, folder)
    missing = {
        unit.name: unit
        for unit in units
        if isinstance(find_record(unit, folder, verify=verify), str)
    }
    # What others are writing at this moment is part of what is missing.
    needed = sum(unit.disk_nbytes for unit in missing.values()) - partial_nbytes(folder)
    check_capacity(folder, needed, f"staging {len(missing)} of {len(units)} files")
    mine = units[number::num_parts]
    todo = [unit for unit in mine if unit.name in missing]
    meter = Meter(sum(unit.disk_nbytes for unit in todo), progress)
    failed = _stage_all(dataset, todo, folder, threads, meter, skip_bad)
    return StageReport(
        directory=str(folder),
        num_files=len(mine),
        num_staged=len(todo) - len(failed),
        num_kept=len(mine) - len(todo),
        failed=failed,
        nbytes=meter.done,
        seconds=time.perf_counter() - began,
    )


def _stage_all(
    dataset: Dataset,
    units: Sequence[Unit],
    folder: Path,
    threads: int,
    meter: Meter,
    skip_bad: bool,
) -> dict[str, str]:
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(threads, "hyperslab-stage") as pool:
        work = {pool.submit(_traced, dataset, unit, folder, meter): unit for unit in units}
        try:
            for future in as_completed(work):
                try:
                    future.result()
                except FormatError as error:
                    if not skip_bad or isinstance(error, WriteError):
                        raise
                    failed[str(work[future].path)] = str(error)
        except BaseException:  # also by Ctrl-C
            meter.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def _traced(dataset: Dataset, unit: Unit, folder: Path, meter: Meter) -> None:
    with active.around(Category.stage, str(unit.path), unit.disk_nbytes):
        _stage_unit(dataset, unit, folder, meter)


def _stage_unit(dataset: Dataset, unit: Unit, folder: Path, meter: Meter) -> None:
    readers = [dataset.reader(unit.index, spec.name) for spec in unit.specs]
    sources = identities_of(readers)
    copied = _copied(dataset, unit, readers, folder, meter)
    files = copied or {
        (name := array_name(unit, spec.name)): write_array(
            dataset, unit, spec, folder / name, meter
        )
        for spec in unit.specs
    }
    if SourceIdentity.of(unit.path) != unit.identity or identities_of(readers) != sources:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise FormatError(f"{unit.path} has changed while it was staged: stage it again")
    write_record(unit, folder, files, sources, is_copy=copied is not None)


def _copied(
    dataset: Dataset, unit: Unit, readers: Sequence[ArrayReader], folder: Path, meter: Meter
) -> dict[str, Written] | None:
    """Copies the file as it is, where that has all that is needed and little else."""
    if not unit.is_worth_a_copy or not _has_its_data(unit, readers):
        return None
    target = folder / unit.name
    written = copy_file(unit.path, target, meter)
    source = dataset.manifest.sources[unit.source_number]
    if not _can_be_opened(source, target):  # it has links to files beside it
        target.unlink(missing_ok=True)
        return None
    return {target.name: written}


def _can_be_opened(source: Source, path: Path) -> bool:
    """Tried again, as another process may have put its own copy there meanwhile."""
    for _ in range(5):
        try:
            source.opening(path)
        except FormatError:
            continue
        return True
    return False


def _has_its_data(unit: Unit, readers: Sequence[ArrayReader]) -> bool:
    """Whether the data lies plainly in the file; one smaller than its arrays has them elsewhere."""
    if not unit.path.is_file() or any(reader.sources for reader in readers):
        return False
    found = [reader.storage() for reader in readers]
    is_plain = all(each.kind in ("contiguous", "chunked") and each.is_seekable for each in found)
    return is_plain and sum(each.nbytes for each in found) <= unit.identity.nbytes


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
    shape, itemsize = shape_of(unit, spec), spec.dtype.itemsize
    header = npy_header(shape, spec.dtype)
    with partial_file(target) as (_, fd):
        writer = CheckedWriter(fd, target)
        writer.write(memoryview(header), 0)
        for position, number in enumerate(unit.numbers):
            box = origin = unit.boxes[spec.name]
            if spec.axes.stacked:  # it comes ``position``-th along the first dim
                box = Box((Span(number, number + 1), *box.spans))
                origin = box.with_span(0, Span(number - position, number - position + 1))
            for tile in tiles(box, grain_of(reader), TILE_NBYTES // itemsize):
                data = empty_aligned(tile.shape, reader.dtype)
                if tile:
                    with explained(unit.path):
                        reader.read(tile, data)
                place = Box.of(*((part.start, part.stop) for part in tile.slices_in(origin)))
                for index, start in runs(place, shape):
                    run = memoryview(data[index].reshape(-1).view(np.uint8))
                    writer.write(run, len(header) + start * itemsize)
                    meter.add(len(run))
        return writer.verified()


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The head of an NPY file, filled up so that the data begins on a page."""
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    head = np.lib.format.magic(1, 0)
    text = repr(fields).encode("latin1")
    length = -(-(len(head) + 3 + len(text)) // PAGE_NBYTES) * PAGE_NBYTES - len(head) - 2
    return head + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
