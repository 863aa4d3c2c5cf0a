"""The flags that tell which slots are filled."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hyperslab.store.segment import Address, Segment, open_segment, view_segment

EMPTY, READY, BAD = 0, 1, 2


class Flags:
    """A byte a slot, which its owner sets when it is done with the slot, and other ranks await.

    A processor may show the flag to another one before what was written into the slot, and may read
    a slot ahead of its flag: x86 does neither, ARM and POWER do both. Python has no fence, and a
    system call need not be one. A lock that both sides take is, on every processor: the owner
    sets the flag while it holds the lock of the flags' file, and whoever has seen the flag takes
    that lock before it reads the slot, hence after the owner has let go of it.
    """

    def __init__(self, fd: int, flags: NDArray[np.uint8]) -> None:
        """Of the file ``fd``, which is closed when nothing refers to the flags any more."""
        self._fd, self._flags = fd, flags
        self._threads = threading.Lock()  # those of a process hold the file's lock as one
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, segment: Segment) -> Flags:
        """Those of this rank itself."""
        return cls(segment.duplicate_fd(), segment.bytes)

    @classmethod
    def map(cls, address: Address) -> Flags:
        """Those of another rank of the node; OSError if they are out of reach."""
        fd = open_segment(address)
        try:
            return cls(fd, view_segment(fd, address))
        except OSError:
            os.close(fd)
            raise

    def set(self, number: int, flag: int) -> None:
        """Called when all that belongs into the slot has been written."""
        with self._locked(fcntl.LOCK_EX):
            self._flags[number] = flag

    def get(self, number: int) -> int:
        """The flag; if it is set, what was written into the slot before can be read."""
        flag = int(self._flags[number])
        if flag != EMPTY:
            with self._locked(fcntl.LOCK_SH):
                pass
        return flag

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._fd, how)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
