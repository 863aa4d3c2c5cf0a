"""The HDF5 library, at the other end of a pipe."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.trace import active

Blob = NDArray[np.uint8]

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from hyperslab.io.formats.hdf5.child import main
main()
"""


class Library:
    """One process that runs the HDF5 library, started when it is first asked.

    It ends with this process, and is started again after it has died. Safe to use from many
    threads, and after a fork.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def ask(self, do: str, path: Path, **what: Any) -> tuple[dict[str, Any], Blob]:
        """The answer to a request of ``child.py``; raises ``FormatError`` if there is none."""
        request = {"do": do, "path": str(path.absolute()), "folder": _folder(), **what}
        with self._lock, active.reading(path, opening=do != "read") as span:
            try:
                answer, blob = self._ask_twice(request)
                span.nbytes = blob.nbytes
            except _ChildDiedError as error:
                raise FormatError(f"{path} {error}") from error
        if "error" in answer:
            raise FormatError(f"{path} {answer['error']}")
        return answer, blob

    def _ask_twice(self, request: dict[str, Any]) -> tuple[dict[str, Any], Blob]:
        """The answer, of a fresh process if the first one dies.

        A process may die of something else than the file: the kernel kills when memory is short.
        """
        try:
            return self._ask_child(request)
        except _ChildDiedError as error:
            if error.is_out_of_time:  # it would be again
                raise
            return self._ask_child(request)

    def _ask_child(self, request: dict[str, Any]) -> tuple[dict[str, Any], Blob]:
        if self._child is None:
            self._child = _Child()
        try:
            return self._child.ask(request)
        except BaseException as error:  # Ctrl-C too: nobody waits for the rest of the answer
            status, self._child = self._child.end(), None
            if isinstance(error, EOFError | BrokenPipeError):
                raise _ChildDiedError(status) from error
            raise

    def end(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None

    def forget(self) -> None:
        """In a forked process: the child is the parent's, and so are those who hold the lock."""
        if self._child is not None:
            self._child.forget()
        self._child, self._lock = None, threading.Lock()


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class _ChildDiedError(Exception):
    """The process ended before its answer did; the words follow the name of the file."""

    def __init__(self, status: int) -> None:
        self.is_out_of_time = status == -signal.SIGXCPU
        name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        if self.is_out_of_time:
            words = "is damaged: the HDF5 library did not come to an end with it"
        elif status >= 0 or -status in _CRASHES:
            words = f"is damaged: the HDF5 library crashed on it ({name})"
        else:
            words = (
                f"cannot be read: the process of the HDF5 library was killed twice ({name}), as "
                "the system does when memory is short"
            )
        super().__init__(words)


class _Child:
    """The process, and the two pipes to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # Files on read-only and network file systems often cannot be locked.
            env={**os.environ, "HDF5_USE_FILE_LOCKING": "FALSE"},
            start_new_session=True,  # Ctrl-C in a terminal goes to a whole group of processes
        )
        self._rest = b""
        try:
            ready, _ = self._receive()
        except EOFError:
            ready = {"error": "its process could not be started"}
        if "error" in ready:
            self.end()
            raise ConfigError(f"HDF5 files are read with h5py: {ready['error']} (pip install h5py)")

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], Blob]:
        assert self._process.stdin is not None
        line = memoryview(json.dumps(request).encode() + b"\n")
        while line:
            line = line[self._process.stdin.write(line) :]
        return self._receive()

    def _receive(self) -> tuple[dict[str, Any], Blob]:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            piece = self._process.stdout.read(2**16)
            if not piece:
                raise EOFError
            self._rest += piece
        line, _, start = self._rest.partition(b"\n")
        self._rest = b""
        header = json.loads(line)
        blob: Blob = empty_aligned((header["nbytes"],), np.uint8)
        blob[: len(start)] = np.frombuffer(start, np.uint8)
        self._fill(blob.data[len(start) :])
        return header, blob

    def _fill(self, buffer: memoryview) -> None:
        assert self._process.stdout is not None
        while buffer:
            count = os.readv(self._process.stdout.fileno(), [buffer])
            if not count:
                raise EOFError
            buffer = buffer[count:]

    def end(self) -> int:
        """Its exit status; a process that lives is killed, as it keeps nothing."""
        self._close_pipes()
        if self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=1)
            self._process.kill()
        return self._process.wait()

    def forget(self) -> None:
        self._close_pipes()
        self._process.returncode = 0  # not ours to wait for

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


library = Library()
atexit.register(library.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=library.forget)
