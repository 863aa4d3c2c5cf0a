"""Files that have another name until they are whole."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hyperslab.errors import FormatError

SUFFIX = ".part"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
ABANDONED_SECONDS = 3600
"""Where files cannot be locked, one that nobody wrote to for so long has no writer."""


class WriteError(FormatError):
    """A file that could not be written."""


@contextmanager
def partial_file(target: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside ``target`` and its descriptor; it takes the name of ``target`` at the end.

    Its bytes are on the disk by then. After an error nothing is left of it. It is locked meanwhile,
    so that ``remove_leftovers`` can tell it from the file of a writer that was killed.
    """
    target = target.resolve()  # not a link, but what it leads to, is replaced
    if target.exists() and not target.is_file():
        raise WriteError(f"{target} cannot be written: it is there, and not a file")
    with explained_writing(target):
        path, fd = _create(target)
        _open.add(path)
        try:
            yield path, fd
            os.fsync(fd)
            path.replace(target)
            sync(target.parent)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            _open.discard(path)
            os.close(fd)


def write_file(path: Path, content: bytes | str) -> None:
    """Writes a file that is there as a whole or not at all."""
    with partial_file(path) as (_, fd), os.fdopen(os.dup(fd), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


_open: set[Path] = set()
"""What this process writes now."""


def remove_open() -> None:
    """Removes what this process is writing, for one that ends at once."""
    for path in list(_open):
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    with explained_writing(path):
        path.mkdir(parents=True, exist_ok=True)


def remove_leftovers(folders: Iterable[Path]) -> int:
    """Removes what killed writers left in ``folders``; says how many files that were."""
    return sum(_removed_if_abandoned(path) for folder in folders for path in partials(folder))


def partials(folder: Path) -> list[Path]:
    """The files in ``folder`` that have not got their names yet."""
    return sorted(folder.glob(f".*{SUFFIX}"))


def partial_nbytes(folder: Path) -> int:
    """The bytes that writers at work have put into ``folder`` so far."""
    total = 0
    for path in partials(folder):
        with suppress(FileNotFoundError):  # whole by now
            total += path.stat().st_size
    return total


def check_capacity(folder: Path, needed: int, what: str) -> None:
    """Raises if the disk of ``folder`` has no room for ``needed`` bytes more."""
    with explained_writing(folder):
        disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise WriteError(
            f"{folder} has too little room: {what} needs {shown_nbytes(needed)}, and "
            f"{shown_nbytes(free)} are free"
        )


@contextmanager
def explained_writing(path: Path) -> Iterator[None]:
    """Within it, an error of the operating system is a ``FormatError`` that says what to do."""
    try:
        yield
    except OSError as error:
        raise WriteError(_reason(path, error)) from error


def shown_nbytes(nbytes: float) -> str:
    """A size as people write it.

    >>> shown_nbytes(5 * 2**20), shown_nbytes(100)
    ('5.0 MiB', '100 B')
    """
    power = 0
    while abs(nbytes) >= 1024 and power < len(UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.1f} {UNITS[power]}" if power else f"{nbytes:.0f} B"


def _reason(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {path} could not be written; make room and run again, what is "
            "finished is kept"
        )
    if error.errno == errno.EFBIG:
        return f"{path} could not be written: it is larger than files may be here (ulimit -f)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path} may not be written: permission denied"
    return f"{path} cannot be written: {error.strerror or error}"


def _create(target: Path) -> tuple[Path, int]:
    while True:
        path = target.parent / f".{target.name[:200]}.{uuid.uuid4().hex[:12]}{SUFFIX}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        if _try_lock(fd) is not False and path.exists():
            return path, fd
        os.close(fd)  # someone who removes leftovers was faster than the lock


def _try_lock(fd: int) -> bool | None:
    """Whether nobody else has it locked; None where files cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _removed_if_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # whole by now, or not ours
        return False
    try:
        is_free = _try_lock(fd)
        if is_free is None:
            is_free = time.time() - os.fstat(fd).st_mtime > ABANDONED_SECONDS
        if is_free:
            path.unlink(missing_ok=True)
        return is_free
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Puts the bytes of a file, or the names in a folder, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
