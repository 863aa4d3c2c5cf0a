"""One file rewritten, read back and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.copying import SourceIdentity, identities_of, is_still
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.files import explained
from hyperslab.io.engine.tiles import grain_of, tiles
from hyperslab.io.opening import open as open_data
from hyperslab.io.reader import ArrayReader, find_format
from hyperslab.io.repack.plan import ArrayPlan, filter_options, sample_words
from hyperslab.layout import Box
from hyperslab.partial import WriteError, partial_file

TILE_NBYTES = 64 << 20
"""Held in memory at a time, or one chunk of the source where that is more."""
COPY_NBYTES = 16 << 20
"""The same of data that is copied as it is."""
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

    nbytes_in: int
    nbytes_out: int
    left_out: list[str]


def is_done(job: Job) -> bool:
    """Whether the target is there, made of this very source in this very way."""
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
    return Done(recipe["identity"][0], nbytes_out, left_out)


def _open(job: Job) -> dict[str, ArrayReader]:
    """The source's arrays by name; raises if they are not like those of the first file."""
    dataset = open_data(job.source, **job.options)
    for plan in job.arrays:
        if (found := sample_words(dataset.arrays[plan.name])) != plan.sample:
            raise FormatError(
                f"{job.source} has samples of {found} in array {plan.name!r}, but {plan.sample} "
                "was expected, as in the first file"
            )
    return dict(zip(dataset.arrays, dataset.manifest.sources[0].open(job.source), strict=True))


def _write(
    sink: Sink,
    job: Job,
    readers: Mapping[str, ArrayReader],
    notes: Mapping[str, str],
    advance: Callable[[int], None],
) -> tuple[list[str], dict[str, list[int]]]:
    def written(nbytes: int) -> None:
        sink.check()
        advance(nbytes)

    with h5py.File(sink, "w") as file:
        checksums = {
            plan.name: _write_array(file, plan, readers[plan.name], job, written)
            for plan in job.arrays
        }
        source_format = find_format(job.source, job.options.get("format"))
        is_hdf5 = source_format is find_format(job.source, "hdf5")
        left_out = _copy_rest(job, file) if is_hdf5 else []
        file.attrs.update(notes)
    sink.check()
    return left_out, checksums


def _copy_rest(job: Job, file: Any) -> list[str]:
    try:
        with h5py.File(job.source, "r", locking=False) as source:
            return _Copier(source, file, [plan.name for plan in job.arrays]).run()
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
    path: Path, job: Job, old_readers: Mapping[str, ArrayReader], checksums: Mapping[str, list[int]]
) -> None:
    """Reads what was written, by our own reader, and raises if it is not what the source gave."""
    names = [plan.name for plan in job.arrays]
    readers = find_format(path, "hdf5").open(path, names)
    for plan, new in zip(job.arrays, readers, strict=True):
        old = old_readers[plan.name]
        for tile, checksum in zip(_tiles(plan, old), checksums[plan.name], strict=True):
            data = empty_aligned(tile.shape, old.dtype)
            spans = tuple(tile.spans[dim] for dim in plan.order)
            new.read(Box(spans), data.transpose(plan.order))
            if new.dtype != old.dtype or crc32(data.reshape(-1).view(np.uint8).data) != checksum:
                raise WriteError(
                    f"{job.target} would not hold what {job.source} does (array {plan.name!r}): "
                    "the disk or the memory may be failing"
                )


class _Copier:
    """Copies groups, datasets, links and attributes of one ``h5py.File`` to another, unchanged.

    All but ``rewritten``, of which only the attributes are. Links to other files lead to where they
    led. Data that lies in other files is written into this one.
    """

    def __init__(self, source: Any, target: Any, rewritten: Collection[str]) -> None:
        self._source, self._target = source, target
        self._rewritten = {name.strip("/") for name in rewritten}
        self._left_out: list[str] = []
        self._places: dict[int, str] = {}
        """Where an object of the source, by its address, is in the target."""

    def run(self) -> list[str]:
        """Says what was left out: what refers to other objects."""
        for name in self._rewritten:
            if self._source[name].file.filename == self._source.filename:
                self._places[_address(self._source[name])] = name
            self._copy_attributes(self._source[name], self._target[name])
        self._copy_group("")
        return self._left_out

    def _copy_group(self, path: str) -> None:
        group = self._source[path] if path else self._source
        self._places[_address(group)] = path or "/"
        self._copy_attributes(group, self._target.require_group(path or "/"))
        for name in group:
            inner = f"{path}/{name}" if path else name
            if inner not in self._rewritten:
                self._copy_link(inner, group.get(name, getlink=True))

    def _copy_link(self, path: str, link: Any) -> None:
        if isinstance(link, h5py.SoftLink):
            self._target[path] = h5py.SoftLink(link.path)
        elif isinstance(link, h5py.ExternalLink):
            beside = Path(self._source.filename).resolve().parent
            self._target[path] = h5py.ExternalLink(beside / link.filename, link.path)
        else:
            self._copy_object(path)

    def _copy_object(self, path: str) -> None:
        found = self._source[path]
        if (place := self._places.get(_address(found))) is not None:
            self._target[path] = self._target[place]
        elif isinstance(found, h5py.Group):
            self._copy_group(path)
        else:
            self._places[_address(found)] = path
            if isinstance(found, h5py.Dataset) and _refers(found.dtype):
                self._left_out.append(f"references in {found.name}")
            elif isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
                self._write_out(found, path)
            else:
                self._source.copy(found, self._target, path, without_attrs=True)
                self._copy_attributes(found, self._target[path])

    def _write_out(self, found: Any, path: str) -> None:
        new = self._target.create_dataset(path, found.shape, found.dtype)
        row = max(1, found.nbytes // max(1, len(found)))
        step = max(1, COPY_NBYTES // row)
        for start in range(0, len(found), step):
            new[start : start + step] = found[start : start + step]
        self._copy_attributes(found, new)

    def _copy_attributes(self, found: Any, new: Any) -> None:
        for name in found.attrs:
            if _refers(found.attrs.get_id(name).dtype):
                self._left_out.append(f"attribute {name!r} of {found.name}")
            else:
                new.attrs[name] = found.attrs[name]


def _refers(dtype: Any) -> bool:
    """Whether its elements lead to places in the file, which are others in a new one."""
    if dtype.names:  # dimension scales, as netCDF has, refer in records
        return any(_refers(dtype[name]) for name in dtype.names)
    return h5py.check_ref_dtype(h5py.check_vlen_dtype(dtype) or dtype) is not None


def _address(found: Any) -> int:
    return int(h5py.h5o.get_info(found.id).addr)


class Sink:
    """The open file ``fd``, as h5py wants its file objects.

    The library cannot be left in peace after a write that failed, as when the disk is full: it
    tries again whenever it closes something. So an error is kept for ``check``, and what is written
    after it is dropped.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises the first error there was."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: os.fstat(self._fd).st_size,
        }
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        data = os.pread(self._fd, size, self._position)
        self._position += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        count = os.preadv(self._fd, [buffer], self._position)
        self._position += count
        return count

    def write(self, data: memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            self._write(view)
        self._position += len(view)
        return len(view)

    def _write(self, view: memoryview) -> None:
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], self._position + done)
        except OSError as error:
            self._error = error

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        if self._error is None:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:
                self._error = error
        return size

    def flush(self) -> None:
        """Nothing is held back."""
