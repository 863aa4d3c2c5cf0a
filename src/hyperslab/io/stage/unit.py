"""What is staged of each file, under which names, and the record of what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from hyperslab.errors import ConfigError
from hyperslab.io.copying import SourceIdentity, identity_or_absent, is_still
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.files import DataFile
from hyperslab.io.manifest import Manifest
from hyperslab.io.spec import ArraySpec, checked_box
from hyperslab.layout import Box
from hyperslab.partial import write_file

VERSION = 3
"""Of names and records: what another version staged is staged anew."""

SUFFIX = ".staged.json"
"""Of the name of a record."""

SMALL = ("csv", "hdf5-attributes")
"""Formats of a few numbers a sample, which are read where they are."""

BLOCK_NBYTES = 8 << 20
"""Read or written at a time."""

HEADER_NBYTES = 1 << 16
"""That a file may have beside its arrays, and still be copied as it is."""


@dataclass(frozen=True)
class Unit:
    """What is staged of one file: for each array one box, the same of each of its samples."""

    path: Path
    source: str
    """The absolute path."""
    identity: SourceIdentity
    source_number: int
    """In the manifest."""
    index: int
    """Of one of its samples in the dataset."""
    numbers: tuple[int, ...]
    """Of the samples in the file."""
    num_samples: int
    """In the file."""
    specs: tuple[ArraySpec, ...]
    boxes: Mapping[str, Box]
    """By the name of the array, in the file's order of dims."""
    tiles: tuple[tuple[int, ...], ...] = ()
    """The extents of the tiles that the file's samples were cut into: these count as samples."""

    @cached_property
    def name(self) -> str:
        """Of a copy, and the beginning of all other names in the directory that belong to this.

        The same for the same bytes.
        """
        boxes = {name: box.spans for name, box in self.boxes.items()}
        what = [self.numbers, boxes, VERSION, *self.tiles]
        start = "-".join([_digest(self.source), _digest(self.identity), _digest(what)])
        return f"{start}-{self.path.name[-100:]}"

    @property
    def is_whole(self) -> bool:
        """Whether all samples of the file are wanted, and all of each."""
        shapes = {spec.name: spec.axes.in_file_order(spec.shape) for spec in self.specs}
        whole = all(box == Box.whole(shapes[name]) for name, box in self.boxes.items())
        return whole and self.numbers == tuple(range(self.num_samples))

    @property
    def nbytes(self) -> int:
        """Of the boxes, not compressed."""
        each = [self.boxes[spec.name].numel * spec.dtype.itemsize for spec in self.specs]
        return len(self.numbers) * sum(each)

    @property
    def is_worth_a_copy(self) -> bool:
        """Whether the file holds what is needed and little else."""
        return self.is_whole and self.identity.nbytes <= self.nbytes * 1.02 + HEADER_NBYTES

    @property
    def disk_nbytes(self) -> int:
        """What it takes on the disk, without headers."""
        return self.identity.nbytes if self.is_worth_a_copy else self.nbytes

    def is_older(self, name: str) -> bool:
        """Whether ``name`` begins like those of a unit of this file before it was changed."""
        source, identity, _ = self.name.split("-", 2)
        return name.startswith(f"{source}-") and not name.startswith(f"{source}-{identity}-")


def plan_units(
    dataset: Dataset, boxes: Mapping[str, Box] | None, samples: Sequence[int] | None
) -> list[Unit]:
    """What is staged of each file that has one of ``samples``, in the order of the files."""
    asked = dict(boxes or {})
    if unknown := sorted(set(asked) - set(dataset.arrays)):
        raise ConfigError(f"boxes are given for {unknown}, but there are {list(dataset.arrays)}")
    for index in samples or ():
        if not 0 <= index < len(dataset):
            raise ConfigError(f"there is no sample {index}: the dataset has {len(dataset)} samples")
    wanted = range(len(dataset)) if samples is None else samples
    sources = enumerate(dataset.manifest.sources)
    return [
        unit
        for number, source in sources
        if source.opening.format not in SMALL
        for unit in _units_of(dataset.manifest, number, asked, wanted)
    ]


def _units_of(
    manifest: Manifest, number: int, asked: Mapping[str, Box], samples: Sequence[int]
) -> list[Unit]:
    """Of the files of one of the sources."""
    source = manifest.sources[number]
    in_file = {
        spec.name: Box(spec.axes.in_file_order(checked_box(asked.get(spec.name), spec).spans))
        for spec in source.arrays
    }
    found: dict[int, dict[int, int]] = {}
    for index in samples:
        file, row = manifest.place(index, number)
        found.setdefault(file, {})[row] = index
    return [
        Unit(
            path=(path := source.files[file].path),
            source=os.path.abspath(path),  # noqa: PTH100 - links stay: what they lead to may change
            identity=identity_or_absent(path),
            source_number=number,
            index=indices[min(indices)],
            numbers=tuple(sorted(indices)),
            num_samples=source.files[file].num_rows * source.num_tiles,
            specs=source.arrays,
            boxes=in_file,
            tiles=tuple(tiling.extents for tiling in source.tilings),
        )
        for file, indices in found.items()
    ]


def _digest(value: object) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()


def shape_of(unit: Unit, spec: ArraySpec) -> tuple[int, ...]:
    """Of what is staged of an array, in the file's order of dims."""
    one = unit.boxes[spec.name].shape
    return (len(unit.numbers), *one) if spec.axes.stacked else one


class Written(NamedTuple):
    """A finished file: its size, and the CRC-32 of its bytes."""

    nbytes: int
    crc: int


@dataclass(frozen=True)
class Record:
    """The files that hold one unit, in the directory of their record."""

    source: str
    identity: tuple[int, int]
    files: Mapping[str, Written]
    """By name."""
    modified_ns: Mapping[str, int]
    """When they were last written to, by name: if later, their checksums are compared."""
    sources: Mapping[str, tuple[int, int]]
    """What other files that hold its data were like, by path."""
    is_copy: bool
    """Whether there is one, a copy of the source as it is, rather than one for each array."""
    version: int = VERSION


def record_path(unit: Unit, directory: Path) -> Path:
    return directory / f"{unit.name}{SUFFIX}"


def array_name(unit: Unit, array: str) -> str:
    """The file of an array; its number stands for a name that may have slashes in it."""
    return f"{unit.name}.{list(unit.boxes).index(array)}.npy"


def write_record(
    unit: Unit,
    directory: Path,
    files: Mapping[str, Written],
    sources: Mapping[str, SourceIdentity],
    is_copy: bool,
) -> None:
    modified_ns = {name: (directory / name).stat().st_mtime_ns for name in files}
    record = Record(unit.source, unit.identity, files, modified_ns, sources, is_copy)
    write_file(record_path(unit, directory), json.dumps(asdict(record), indent=1))


def find_record(unit: Unit, directory: Path, *, verify: bool = False) -> Record | str:
    """The record of ``unit``, or in words why what is there cannot be used.

    The sizes of its files are compared with the disk, and their checksums with ``verify`` or where
    a file was written to since.
    """
    try:
        content = json.loads(record_path(unit, directory).read_text())
        record = Record(**content)
        expected = {name: Written(*written) for name, written in record.files.items()}
    except FileNotFoundError:
        return "it was not staged, or has changed since"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"its record cannot be read ({error})"
    if (record.source, tuple(record.identity)) != (unit.source, tuple(unit.identity)):
        return "its record is of another file"
    for source, identity in record.sources.items():
        if not is_still(source, identity):
            return f"{source}, in which its data lies, has changed"
    for name, written in expected.items():
        if reason := _damage(directory / name, written, record.modified_ns.get(name), verify):
            return reason
    return record


def remove_older(units: list[Unit], directory: Path) -> None:
    """Removes what was staged of files that have changed since."""
    by_source = {unit.name.split("-", 1)[0]: unit for unit in units}
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    # Records go first: what has a record is whole.
    for name in sorted(names, key=lambda name: not name.endswith(SUFFIX)):
        unit = by_source.get(name.split("-", 1)[0])
        if unit is not None and unit.is_older(name):
            with suppress(OSError):
                (directory / name).unlink()


def _damage(path: Path, expected: Written, modified_ns: int | None, verify: bool) -> str | None:
    try:
        status = path.stat()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if (size := status.st_size) != expected.nbytes:
        return f"{path} has {size} bytes, and {expected.nbytes} were staged"
    is_doubtful = verify or status.st_mtime_ns != modified_ns
    if is_doubtful and size and checksum_of(path) != expected:
        return f"{path} is damaged: its checksum is not that of what was staged"
    return None


def checksum_of(path: Path) -> Written:
    """The size and the CRC-32 of a file."""
    file = DataFile.look_at(path)
    buffer, crc = memoryview(bytearray(BLOCK_NBYTES)), 0
    with file.opened() as fd:
        for start in range(0, file.size, BLOCK_NBYTES):
            block = buffer[: file.size - start]
            file.fill(fd, block, start)
            crc = crc32(block, crc)
    return Written(file.size, crc)
