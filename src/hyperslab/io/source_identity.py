"""By what a file is known to be the one that was copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import explained
from hyperslab.io.reader import ArrayReader


class SourceIdentity(NamedTuple):
    """What changes when a file is written to; the same on every node that sees it."""

    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> SourceIdentity:
        with explained(path):
            status = path.stat()
            if not path.is_dir():
                return cls(status.st_size, status.st_mtime_ns)
            inside = [entry.stat() for entry in path.rglob("*") if entry.is_file()]
        newest = max((each.st_mtime_ns for each in inside), default=status.st_mtime_ns)
        return cls(sum(each.st_size for each in inside), newest)


def identities_of(readers: Iterable[ArrayReader]) -> dict[str, SourceIdentity]:
    """Of the files beside the one named in which the arrays' data lies, by path."""
    paths = {source.absolute() for reader in readers for source in reader.sources}
    return {str(path): SourceIdentity.of(path) for path in sorted(paths)}


def is_still(path: str, identity: Sequence[int]) -> bool:
    try:
        return SourceIdentity.of(Path(path)) == tuple(identity)
    except FormatError:
        return False


ABSENT = SourceIdentity(0, -1)
