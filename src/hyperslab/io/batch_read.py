"""Many reads with one system call, during which other threads may run Python.

A call for each read costs a microsecond or two, and threads that make short calls spend their time
waiting for Python's lock: four of them took twice as long as one, where with Linux' ``io_submit``
they take half as long. That is meant for reads which go on by themselves; reads of the page cache
it does one after the other, and they are done when it returns.

The kernel does not count these reads in the ``rchar`` of ``/proc/self/io``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

BATCH_SIZE = 64
"""Reads in one call."""
MAX_CONTEXTS = 8
"""Threads that may be in such a call at once; the kernel has few contexts for all processes."""

_CALLS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209},
    "aarch64": {"io_setup": 0, "io_destroy": 1, "io_getevents": 4, "io_submit": 2},
}
_IS_KNOWN = sys.platform == "linux" and sys.maxsize > 2**32
_NUMBERS = _CALLS.get(platform.machine(), {}) if _IS_KNOWN else {}
_REQUEST = np.dtype(
    [
        *(("number", "u8"), ("key", "u4"), ("flags", "u4"), ("operation", "u2"), ("prio", "i2")),
        *(("fd", "u4"), ("address", "u8"), ("nbytes", "u8"), ("offset", "i8")),
        *(("reserved", "u8"), ("event_flags", "u4"), ("event_fd", "u4")),
    ]
)
"""The kernel's ``struct iocb``; operation 0 is ``pread``."""
_EVENT = np.dtype([("number", "u8"), ("request", "u8"), ("count", "i8"), ("count2", "i8")])

Numbers = NDArray[np.int64]


def read_batch(
    fd: int, offsets: Numbers, addresses: Numbers, nbytes: int, flags: int = 0
) -> Numbers:
    """Reads ``nbytes`` from each of ``offsets`` into memory at each of ``addresses``.

    Returns how many bytes came of each: fewer, none or less than none where something is the
    matter, such as a system that has no such call, or data that would have to be waited for and
    ``flags`` (those of ``os.preadv``) that forbid it. At most ``BATCH_SIZE`` of them. The caller
    keeps the memory.
    """
    counts = np.zeros(len(offsets), np.int64)
    with _contexts.one() as context:
        if context is not None:
            context.read(fd, offsets, addresses, nbytes, flags, counts)
    return counts


def can_batch() -> bool:
    """Whether ``read_batch`` does anything here, as far as is known."""
    return _contexts.is_possible


class _Context:
    """What the kernel keeps for a thread that is in a call, and the memory that they share."""

    def __init__(self) -> None:
        handle = ctypes.c_ulong(0)
        _call("io_setup", BATCH_SIZE, ctypes.addressof(handle))
        self._handle = handle.value
        self._requests = np.zeros(BATCH_SIZE, _REQUEST)
        self._requests["number"] = np.arange(BATCH_SIZE)
        first = self._requests.ctypes.data
        self._pointers = first + _REQUEST.itemsize * np.arange(BATCH_SIZE, dtype=np.uint64)
        self._events = np.zeros(BATCH_SIZE, _EVENT)

    def read(
        self,
        fd: int,
        offsets: Numbers,
        addresses: Numbers,
        nbytes: int,
        flags: int,
        counts: Numbers,
    ) -> None:
        requests = self._requests[: len(offsets)]
        requests["fd"], requests["nbytes"], requests["flags"] = fd, nbytes, flags
        requests["offset"], requests["address"] = offsets, addresses
        try:
            left = _call("io_submit", self._handle, len(offsets), self._pointers.ctypes.data)
        except OSError:  # not on this file system, or not with these flags
            return
        while left:  # the kernel may have taken fewer: then the caller reads the rest
            events = self._events[: self._finished(left)]
            counts[events["number"]] = events["count"]
            left -= len(events)

    def _finished(self, num: int) -> int:
        arguments = (num, self._events.ctypes.data, 0)
        # Most often all of them are, and there is no need to give up Python's lock.
        found = _call("io_getevents", self._handle, 0, *arguments, keep_lock=True)
        return found or _call("io_getevents", self._handle, 1, *arguments)

    def close(self) -> None:
        """Waits for the reads that are still under way, if any."""
        _call("io_destroy", self._handle)


class _Contexts:
    """At most ``MAX_CONTEXTS``, made when they are first needed."""

    def __init__(self) -> None:
        self._free: list[_Context] = []
        self._room = threading.Semaphore(MAX_CONTEXTS)
        self.is_possible = bool(_NUMBERS)

    @contextmanager
    def one(self) -> Iterator[_Context | None]:
        """A context that nobody else uses, or None where there can be none."""
        with self._room:
            context = self._take() if self.is_possible else None
            try:
                yield context
            except BaseException:
                if context is not None:
                    context.close()
                raise
            if context is not None:
                self._free.append(context)

    def _take(self) -> _Context | None:
        with suppress(IndexError):
            return self._free.pop()
        try:
            return _Context()
        except OSError as error:
            # All the contexts of the machine are in use, or it will never have one for us.
            self.is_possible = error.errno == errno.EAGAIN
            return None


def _call(name: str, *arguments: int, keep_lock: bool = False) -> int:
    syscall = _quick_syscall if keep_lock else _syscall
    result = int(syscall(*map(ctypes.c_long, (_NUMBERS[name], *arguments))))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_quick_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = _quick_syscall.restype = ctypes.c_long

_contexts = _Contexts()


def _after_fork() -> None:
    global _contexts
    _contexts = _Contexts()


os.register_at_fork(after_in_child=_after_fork)
