"""What is known of a staged file: written last, so that what has a record is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hyperslab.io.partial import partial_file
from hyperslab.io.source_identity import SourceIdentity, is_still
from hyperslab.io.stage.plan import VERSION, Unit
from hyperslab.io.stage.write import Written, checksum_of

SUFFIX = ".staged.json"


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


def copy_name(unit: Unit) -> str:
    return unit.name


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
    with partial_file(record_path(unit, directory)) as (_, fd):
        os.write(fd, json.dumps(asdict(record), indent=1).encode())


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
