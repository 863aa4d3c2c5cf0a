"""By what a file is known to be the one that was copied."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hyperslab.io.files import explained


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


ABSENT = SourceIdentity(0, -1)
