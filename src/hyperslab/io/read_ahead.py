"""Reading ranges of a file that are known beforehand, without waiting for each in turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hyperslab.io.batch_read import Numbers, read_batch
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

    def fill_rows(self, rows: NDArray[np.uint8], offset: int, step: int) -> None:
        """Fills each of ``rows`` from ``step`` bytes further on than the one before.

        Does what ``fill`` does, with few system calls. A row lies in one piece in memory; there are
        at most ``BATCH_SIZE`` of them.
        """
        if len(rows) == 1:
            return self.fill(rows[0].data, offset)
        missing = np.arange(len(rows))
        if self._coming is None:
            missing = self._try_rows(rows, missing, offset, step, os.RWF_NOWAIT)
        if missing.size:
            for _ in missing:
                self._tell(rows.shape[1])
            missing = self._try_rows(rows, missing, offset, step, 0)
        for number in missing.tolist():
            self._file.fill(self._fd, rows[number].data, offset + step * number)
        self._num_read += len(rows)
        return None

    def _try_rows(
        self, rows: NDArray[np.uint8], wanted: Numbers, offset: int, step: int, flags: int
    ) -> Numbers:
        """Which of the ``wanted`` rows could not be filled."""
        offsets, addresses = offset + step * wanted, rows.ctypes.data + rows.strides[0] * wanted
        counts = read_batch(self._fd, offsets, addresses, rows.shape[1], flags)
        missing: Numbers = wanted[counts != rows.shape[1]]
        return missing

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
