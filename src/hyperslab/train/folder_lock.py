"""A lock on a folder, so that two runs do not write into one."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import ConfigError
from hyperslab.io.partial import explained_writing

NAME = ".lock"


class Holder(NamedTuple):
    """The process that took a lock, as it has written into the file."""

    host: str
    pid: int

    @property
    def may_live(self) -> bool:
        """Of other hosts nobody here can tell."""
        return self.host != platform.node() or Path(f"/proc/{self.pid}").exists()


class FolderLock:
    """Held through an open file, so that the system releases it however the process ends.

    Where the file system has no locks, the name of the holder decides.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._pid = os.getpid()

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Raises ``ConfigError`` if another run has it."""
        path = folder / NAME
        with explained_writing(path):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                _check_free(fd, path)
                _write(fd, json.dumps(Holder(platform.node(), os.getpid())))
            except BaseException:
                os.close(fd)
                raise
        return cls(fd)

    def release(self) -> None:
        if self._fd is not None and self._pid == os.getpid():  # not in a fork
            with suppress(OSError):
                _write(self._fd, "")
            os.close(self._fd)
        self._fd = None

    def __del__(self) -> None:
        self.release()


def _check_free(fd: int, path: Path) -> None:
    holder, advice = _holder(fd), ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks
        if holder is None or not holder.may_live:
            return
        advice = f"; if it is gone, remove {path}"
    who = f"process {holder.pid} on {holder.host}" if holder else "just started"
    raise ConfigError(
        f"another run writes into {path.parent} ({who}): stop it, or choose another folder with "
        f"--folder{advice}"
    )


def _holder(fd: int) -> Holder | None:
    try:
        host, pid = json.loads(os.pread(fd, 1000, 0))
    except (ValueError, TypeError):
        return None
    return Holder(str(host), int(pid))


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)
