"""One file rewritten, read back and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.files import explained
from hyperslab.io.engine.tiles import grain_of, tiles
from hyperslab.io.opening import open as open_data
from hyperslab.io.partial import WriteError, partial_file
from hyperslab.io.reader import ArrayReader, find_format
from hyperslab.io.repack.plan import ArrayPlan, filter_options, sample_words
from hyperslab.io.repack.rest import copy_rest
from hyperslab.io.repack.sink import Sink
from hyperslab.io.source_identity import SourceIdentity, identities_of, is_still
from hyperslab.layout import Box, Span

TILE_NBYTES = 64 << 20
"""Held in memory at a time, or one chunk of the source where that is more."""
LIBRARY_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError)
"""What h5py raises over damaged files."""
ATTRIBUTE = "hyperslab_repack"
"""Of a file we wrote: what it was made of, and how."""
SOURCES = "hyperslab_repack_sources"
"""And what other files were like, in which the data lay."""


@dataclass(frozen=True)
class Job:
    """A file to rewrite."""

    source: Path
    target: Path
    options: Mapping[str, Any]
    """What ``hyperslab.open`` takes to open the source."""
    arrays: tuple[ArrayPlan, ...]
    compression: str

    def recipe(self) -> dict[str, Any]:
        """What makes the target, as JSON gives it back."""
        made = {
            "version": 1,
            "source": str(self.source.resolve()),
            "identity": SourceIdentity.of(self.source),
            "arrays": [asdict(array) for array in self.arrays],
            "compression": self.compression,
        }
        found: dict[str, Any] = json.loads(json.dumps(made))
        return found


@dataclass(frozen=True)
class Done:
    """A file that was rewritten."""

    source: Path
    nbytes_in: int
    nbytes_out: int
    left_out: list[str] = field(default_factory=list)


def is_done(job: Job) -> bool:
    """Whether the target is there, made of this very source in this very way."""
    import h5py

    if not job.target.exists():
        return False
    try:
        with h5py.File(job.target, "r", locking=False) as file:
            text = file.attrs.get(ATTRIBUTE)
            recipe = json.loads(text) if text is not None else None
            sources = json.loads(file.attrs.get(SOURCES, "{}"))
    except (OSError, ValueError) as error:
        raise WriteError(
            f"{job.target} is there and cannot be read as a file that was repacked ({error}): "
            "remove it, or give another folder"
        ) from error
    if recipe is None:
        raise WriteError(
            f"{job.target} is there and was not written by repack: remove it, or give another "
            "folder"
        )
    return recipe == job.recipe() and all(is_still(*source) for source in sources.items())


def repack_file(job: Job, advance: Callable[[int], None]) -> Done:
    """Writes the target of ``job``; ``advance`` is told of bytes read."""
    recipe = job.recipe()
    readers = _open(job)
    with partial_file(job.target) as (path, fd):
        sources = identities_of(readers.values())
        notes = {ATTRIBUTE: json.dumps(recipe), SOURCES: json.dumps(sources)}
        left_out, checksums = _write(Sink(fd), job, readers, notes, advance)
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, not memory
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        _compare(path, job, readers, checksums)
        is_same = SourceIdentity.of(job.source) == tuple(recipe["identity"])
        if not is_same or identities_of(readers.values()) != sources:
            raise FormatError(f"{job.source} has changed while it was read: repack it again")
        nbytes_out = os.fstat(fd).st_size
    return Done(job.source, recipe["identity"][0], nbytes_out, left_out)


def _open(job: Job) -> dict[str, ArrayReader]:
    """The source's arrays by name; raises if they are not like those of the first file."""
    dataset = open_data(job.source, **job.options)
    for plan in job.arrays:
        if (found := sample_words(dataset.arrays[plan.name])) != plan.sample:
            raise FormatError(
                f"{job.source} has samples of {found} in array {plan.name!r}, but {plan.sample} "
                "was expected, as in the first file"
            )
    return dict(zip(dataset.arrays, dataset.open_file(job.source), strict=True))


def _write(
    sink: Sink,
    job: Job,
    readers: Mapping[str, ArrayReader],
    notes: Mapping[str, str],
    advance: Callable[[int], None],
) -> tuple[list[str], dict[str, list[int]]]:
    import h5py

    def written(nbytes: int) -> None:
        sink.check()
        advance(nbytes)

    with h5py.File(sink, "w") as file:
        checksums = {
            plan.name: _write_array(file, plan, readers[plan.name], job, written)
            for plan in job.arrays
        }
        left_out = _copy_rest(job, file) if _is_hdf5(job) else []
        file.attrs.update(notes)
    sink.check()
    return left_out, checksums


def _copy_rest(job: Job, file: Any) -> list[str]:
    import h5py

    try:
        with h5py.File(job.source, "r", locking=False) as source:
            return copy_rest(source, file, [plan.name for plan in job.arrays])
    except LIBRARY_ERRORS as error:
        raise FormatError(
            f"{job.source} holds more than its arrays, which cannot be copied: {error}"
        ) from error


def _write_array(
    file: Any, plan: ArrayPlan, reader: ArrayReader, job: Job, advance: Callable[[int], None]
) -> list[int]:
    """Writes an array; gives the checksum of each tile as it came from the source."""
    shape = tuple(reader.shape[dim] for dim in plan.order)
    chunked: dict[str, Any] = {}
    if plan.chunks is not None and all(shape):
        chunks = tuple(min(pair) for pair in zip(plan.chunks, shape, strict=True))
        chunked = {"chunks": chunks, **filter_options(job.compression)}
    new = file.create_dataset(plan.name, shape, reader.dtype, **chunked)
    checksums = []
    for tile in _tiles(plan, reader):
        with explained(job.source):
            data, checksum = _read(reader, tile)
        checksums.append(checksum)
        spans = [tile.spans[dim] for dim in plan.order]
        new[tuple(slice(*span) for span in spans)] = data.transpose(plan.order)
        advance(data.nbytes)
    return checksums


def _tiles(plan: ArrayPlan, reader: ArrayReader) -> Iterator[Box]:
    """Boxes of the source that end where its chunks end, or those written."""
    grain = list(grain_of(reader))
    for dim, length in zip(plan.order, plan.chunks or (), strict=False):
        grain[dim] = -(-grain[dim] // length) * length
    numel = TILE_NBYTES // max(1, reader.dtype.itemsize)
    return (tile for tile in tiles(Box.whole(reader.shape), grain, numel) if tile)


def _read(reader: ArrayReader, box: Box) -> tuple[NDArray[Any], int]:
    data = empty_aligned(box.shape, reader.dtype)
    reader.read(box, data)
    return data, crc32(data.reshape(-1).view(np.uint8).data)


def _compare(
    path: Path,
    job: Job,
    old_readers: Mapping[str, ArrayReader],
    checksums: Mapping[str, list[int]],
) -> None:
    """Reads what was written, by our own reader, and raises if it is not what the source gave."""
    names = [plan.name for plan in job.arrays]
    readers = find_format(path, "hdf5").open(path, names)
    for plan, new in zip(job.arrays, readers, strict=True):
        old = old_readers[plan.name]
        for tile, checksum in zip(_tiles(plan, old), checksums[plan.name], strict=True):
            data = empty_aligned(tile.shape, old.dtype)
            spans: list[Span] = [tile.spans[dim] for dim in plan.order]
            new.read(Box(tuple(spans)), data.transpose(plan.order))
            if new.dtype != old.dtype or crc32(data.reshape(-1).view(np.uint8).data) != checksum:
                raise WriteError(
                    f"{job.target} would not hold what {job.source} does (array {plan.name!r}): "
                    "the disk or the memory may be failing"
                )


def _is_hdf5(job: Job) -> bool:
    return find_format(job.source, job.options.get("format")) is find_format(job.source, "hdf5")
