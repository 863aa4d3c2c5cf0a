"""What staging and repacking share: progress, and whether a source is still the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import FormatError
from hyperslab.io.engine.files import explained
from hyperslab.io.reader import ArrayReader

Progress = Callable[[int, int], None]
"""Is called with the bytes done so far, and with those there are to do."""


class Stopped(Exception):  # noqa: N818 - no error: someone else has one, or pressed Ctrl-C
    """Raised in the threads of a piece of work that was given up."""


class Meter:
    """Counts what threads have done, and stops them."""

    def __init__(self, total: int, progress: Progress | None = None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = False

    def add(self, nbytes: int) -> None:
        """Tells of ``nbytes`` more; raises ``Stopped`` if there is no use in going on."""
        if self._stopped:
            raise Stopped
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)

    def stop(self) -> None:
        self._stopped = True


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


def identity_or_absent(path: Path) -> SourceIdentity:
    """The same of a file that may not be there; that is told when it is read."""
    try:
        return SourceIdentity.of(path)
    except FormatError:
        return SourceIdentity(0, -1)


def is_still(path: str, identity: Sequence[int]) -> bool:
    return identity_or_absent(Path(path)) == tuple(identity)
