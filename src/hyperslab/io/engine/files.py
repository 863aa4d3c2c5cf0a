"""Files that are read by many threads, a piece at a time."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import FormatError
from hyperslab.io.engine.threads import ForkSafeLock
from hyperslab.trace import active

MAX_OPEN = 256
"""Files kept open for the next read; a training set may have more files than a process may open."""


class Identity(NamedTuple):
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @property
    def version(self) -> tuple[int, int]:
        """What tells a changed or replaced file on every file system.

        Some that are mounted by users' programs number the same file anew from time to time.
        """
        return self.size, self.modified_ns

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class DataFile:
    """A file as it was when it was first looked at; reading a changed one raises."""

    path: Path
    identity: Identity

    @classmethod
    def look_at(cls, path: str | os.PathLike[str]) -> DataFile:
        path = Path(path)
        with explained(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise FormatError(f"{path} is a directory, and a file was expected")
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file")
        if not status.st_size:
            raise FormatError(f"{path} is empty (0 bytes)")
        return cls(path, Identity.of(status))

    def __hash__(self) -> int:
        return hash(self.identity)  # that of a path is slow, and files differ in this already

    @property
    def size(self) -> int:
        return self.identity.size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills ``buffer`` with the bytes from ``offset``; safe to call from many threads."""
        with self.opened() as fd, active.reading(self.path, len(buffer)):
            self.fill(fd, buffer, offset)

    def read(self, offset: int, nbytes: int) -> bytearray:
        self.check_range(offset, nbytes)
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), offset)
        return buffer

    def fill(self, fd: int, buffer: memoryview, offset: int) -> None:
        """As ``read_into``, with the descriptor that ``opened`` gave: for many reads of one box."""
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            if not count:
                self._raise_short(offset + len(buffer), os.fstat(fd).st_size)
            done += count

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raises unless the file has those bytes: a damaged length must not ask for all memory."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            self._raise_short(offset + nbytes, self.size)

    def _raise_short(self, needed: int, size: int) -> None:
        raise FormatError(
            f"{self.path} is truncated or damaged: it has {size} bytes, and bytes up to {needed} "
            "were to be read"
        )

    def opened(self) -> _Opened:
        """A descriptor of the unchanged file; raises at the end if it was changed meanwhile.

        Or replaced: the descriptor would go on with the old one, while others read the new.
        """
        return _Opened(self)

    def check_unchanged(self, status: os.stat_result) -> None:
        if (status.st_size, status.st_mtime_ns) != self.identity.version:
            raise FormatError(
                f"{self.path} has changed since it was opened: it is being written to, or was "
                "replaced; open the data again when it is finished"
            )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Within it, an error of the operating system is a ``FormatError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise _explanation(path, error) from error


def _explanation(path: Path, error: OSError) -> FormatError:
    if isinstance(error, FileNotFoundError):
        return FormatError(f"{path} does not exist")
    if isinstance(error, IsADirectoryError):
        return FormatError(f"{path} is a directory, and a file was expected")
    if isinstance(error, PermissionError):
        return FormatError(f"{path} may not be read: permission denied")
    return FormatError(f"{path} cannot be read: {error.strerror or error}")


def nbytes_on_disk(path: Path) -> int:
    """Of a file, or of all files below a directory."""
    with explained(path):
        if not path.is_dir():
            return path.stat().st_size
        return sum(inside.stat().st_size for inside in path.rglob("*") if inside.is_file())


class _Handle:
    __slots__ = ("fd", "path", "users")

    def __init__(self, file: DataFile) -> None:
        self.path = os.fspath(file.path)
        self.users = 0
        with active.reading(self.path, opening=True):
            self.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                file.check_unchanged(os.fstat(self.fd))
            except FormatError:
                os.close(self.fd)
                raise


class _OpenFiles:
    """Descriptors by file, the least recently used closed first, and none while it is in use."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._handles: OrderedDict[DataFile, _Handle] = OrderedDict()

    def take(self, file: DataFile) -> _Handle:
        with self._lock:
            if handle := self._handles.get(file):
                self._handles.move_to_end(file)
                handle.users += 1
                return handle
        new = _Handle(file)  # without the lock: a server that is slow stops nobody else
        with self._lock:
            handle = self._handles.setdefault(file, new)
            self._handles.move_to_end(file)
            handle.users += 1
        if handle is not new:  # another thread was faster
            os.close(new.fd)
        return handle

    def put_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if len(self._handles) > MAX_OPEN:
                self._close_oldest(len(self._handles) - MAX_OPEN)

    def _close_oldest(self, num: int) -> None:
        for file in list(self._handles)[:num]:
            if not self._handles[file].users:
                os.close(self._handles.pop(file).fd)


_open_files = _OpenFiles()


class _Opened:
    """What ``DataFile.opened`` gives: of ``contextmanager``, every read would pay for the calls."""

    __slots__ = ("_file", "_handle")

    def __init__(self, file: DataFile) -> None:
        self._file = file

    def __enter__(self) -> int:
        try:
            self._handle = _open_files.take(self._file)
        except OSError as error:
            raise _explanation(self._file.path, error) from error
        return self._handle.fd

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                path = self._handle.path
                self._file.check_unchanged(os.stat(path))  # noqa: PTH116 - three calls fewer
        except OSError as missing:
            raise _explanation(self._file.path, missing) from missing
        finally:
            _open_files.put_back(self._handle)
        if isinstance(error, OSError):
            raise _explanation(self._file.path, error) from error
