"""Reading ranges of a file that are known beforehand, without waiting for each in turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from hyperslab.io.files import DataFile

AHEAD_NBYTES = 32 << 20
"""How far ahead of the reads the kernel is told what will be wanted."""
AHEAD_RANGES = 1024

Range = tuple[int, int]
"""Offset and number of bytes."""


class RangeReader:
    """Reads ranges of an open file, about in the order of ``ranges()``, from several threads.

    What lies in the page cache is copied at once. From the first range that does not, the disk is
    told of the ranges to come (strided boxes were read 3 times faster so), and of no others: by
    default the kernel would read the gaps as well. Without ``ranges``, it does as it likes.
    """

    def __init__(
        self, file: DataFile, fd: int, ranges: Callable[[], Iterator[Range]] | None
    ) -> None:
        self._file, self._fd = file, fd
        self._ranges = ranges or (lambda: iter(()))
        self._lock = threading.Lock()
        self._coming: Iterator[Range] | None = None
        self._num_read = self._told_ranges = self._told_nbytes = 0
        self._advise(0, 0, os.POSIX_FADV_RANDOM if ranges else os.POSIX_FADV_NORMAL)

    def fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        if self._coming is None:
            try:
                done = os.preadv(self._fd, [buffer], offset, os.RWF_NOWAIT)
            except OSError:  # not in memory, or a file system that cannot tell
                done = 0
        if done < len(buffer):
            self._tell(len(buffer))
            self._file.fill(self._fd, buffer[done:], offset + done)
        self._num_read += 1

    def _tell(self, nbytes: int) -> None:
        """Tells of ranges as far ahead as we mean to, when ``nbytes`` more are about to be read."""
        with self._lock:
            if self._coming is None:
                self._coming = islice(self._ranges(), self._num_read, None)
            while self._told_nbytes < AHEAD_NBYTES and self._told_ranges < AHEAD_RANGES:
                if (found := next(self._coming, None)) is None:
                    break
                self._advise(*found, os.POSIX_FADV_WILLNEED)
                self._told_nbytes += found[1]
                self._told_ranges += 1
            self._told_nbytes -= nbytes
            self._told_ranges -= 1

    def _advise(self, offset: int, nbytes: int, advice: int) -> None:
        with suppress(OSError):  # a file system that takes no advice
            os.posix_fadvise(self._fd, offset, nbytes, advice)
