"""Notes that trainers leave for each other in a folder, and who of them is alive.

A folder has no process that keeps it: whichever trainer dies, the others read on, and one that
comes back finds what it has missed.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.partial import WriteError, explained_writing, make_folder

Note = Any
"""What JSON holds."""
LOOK_SECONDS = 1.0
"""So long at most a lock is held by those who only look whether it is held."""


class Board:
    """Notes by name in ``folder``, which all trainers see. Each is there as a whole or not at all.

    Nothing here waits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: dict[str, int] = {}
        make_folder(folder)

    def read(self, name: str) -> Note | None:
        try:
            return json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None

    def post(self, name: str, note: Note) -> None:
        """In the place of an earlier note of that name. It need not survive a loss of power."""
        path = self.folder / f"{name}.json"
        with explained_writing(path):
            self._written(name, note).replace(path)

    def post_first(self, name: str, note: Note) -> Note:
        """The note of that name: this one, unless there is one already."""
        path = self.folder / f"{name}.json"
        with explained_writing(path):
            mine = self._written(name, note)
            try:
                path.hardlink_to(mine)
            except FileExistsError:
                pass
            finally:
                mine.unlink()
        return self.read(name)

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def highest(self, name: str) -> int | None:
        """The highest of the numbers behind ``name`` for which there are notes."""
        found = self.folder.glob(f"{name}-*.json")
        return max((int(path.stem.removeprefix(f"{name}-")) for path in found), default=None)

    def _written(self, name: str, note: Note) -> Path:
        path = self.folder / f".{name}.{os.getpid()}.part"
        path.write_text(json.dumps(note))
        return path

    # Who is alive: the system releases a lock with its process, however that ends

    def hold(self, name: str) -> None:
        """Shows that this process lives, until ``close`` or its end."""
        path = self.folder / f"{name}.lock"
        with explained_writing(path):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        until = time.monotonic() + LOOK_SECONDS
        while (is_free := _try_lock(fd, fcntl.LOCK_EX)) is False and time.monotonic() < until:
            time.sleep(0.01)  # it may be one who only looks
        if is_free is False:
            os.close(fd)
            raise ConfigError(f"{name} is played by another process already ({path})")
        self._locks[name] = fd

    def is_held(self, name: str) -> bool:
        """Whether a process that lives has called ``hold``; where nobody can tell, it has."""
        path = self.folder / f"{name}.lock"
        if name in self._locks:
            return True
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return _try_lock(fd, fcntl.LOCK_SH) is not True
        finally:
            os.close(fd)

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.popitem()[1])


def _try_lock(fd: int, how: int) -> bool | None:
    """Whether nobody has it; None where files cannot be locked.

    Who is gone is then missed by the time-out alone.
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """One line of JSON at the end of a file that several processes write to."""
    content = (json.dumps(line) + "\n").encode()
    with explained_writing(path):
        fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.write(fd, content) < len(content):
                raise WriteError(f"{path} could not be written to its end: make room")
        finally:
            os.close(fd)
