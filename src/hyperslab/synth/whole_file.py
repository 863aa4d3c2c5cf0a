"""HDF5 files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import h5py

from hyperslab.errors import ConfigError, FormatError, HyperslabError

MADE_WITH = "made_with"
"""The attribute of a file that says with which settings it was made, as JSON."""

Settings = Mapping[str, str | int | float]


@contextmanager
def whole_file(path: Path, settings: Settings) -> Iterator[h5py.File]:
    """A new file to fill; it gets its name when it is complete and on disk, and is gone otherwise.

    Until then it has a hidden name of this process' own: two processes may make the same file.
    """
    part = path.with_name(f".{path.name}{_owner(os.getpid())}")
    try:
        with explained(path):
            with h5py.File(part, "w") as file:
                file.attrs[MADE_WITH] = json.dumps(dict(settings))
                yield file
            _sync(part)
            part.replace(path)
            _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def remove_leftovers(folder: Path, pids: Iterable[int] = ()) -> None:
    """Removes what processes on this machine left unfinished: those in ``pids``, and ended ones."""
    ended = set(pids)
    for part in folder.glob(f".*.{_host()}.*.part"):
        pid = part.name.split(".")[-2]
        if pid.isdigit() and (int(pid) in ended or not _is_alive(int(pid))):
            part.unlink(missing_ok=True)


def is_whole(path: Path, settings: Settings) -> bool:
    """Whether the file is there, made with ``settings``; raises if it is something else."""
    if not path.exists():
        return False
    try:
        with h5py.File(path, "r") as file:
            text = file.attrs.get(MADE_WITH)
    except (OSError, RuntimeError, KeyError) as error:  # as h5py reports damage
        raise FormatError(f"{path} exists and cannot be read ({error}): {_WAYS_OUT}") from error
    try:
        was = dict(json.loads(text))
    except (TypeError, ValueError):
        raise ConfigError(f"{path} was not made by this command: {_WAYS_OUT}") from None
    if changed := sorted(name for name in {*was, *settings} if was.get(name) != settings.get(name)):
        there, asked = (
            ", ".join(f"{name}={made.get(name)}" for name in changed) for made in (was, settings)
        )
        raise ConfigError(f"{path} was made with {there}, not {asked}: {_WAYS_OUT}")
    return True


_WAYS_OUT = "choose another folder, or overwrite its files with --overwrite"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Within it, what the system or HDF5 refuses to do with ``path`` is a ``HyperslabError``."""
    try:
        yield
    except HyperslabError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC or "No space left" in str(error):
            reason = "the disk is full"
        raise FormatError(f"{path} cannot be written: {reason}") from error


def _owner(pid: int) -> str:
    return f".{_host()}.{pid}.part"


def _host() -> str:
    return socket.gethostname().partition(".")[0] or "host"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():  # which some file systems do not sync
            raise
    finally:
        os.close(fd)
