"""Reading ranges of a file that are known beforehand, without waiting for each in turn."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import numpy as np

from hyperslab.io.engine.buffers import Bytes, empty_aligned
from hyperslab.io.engine.files import DataFile

AHEAD_NBYTES = 32 << 20
"""How far ahead of the reads the kernel is told what will be wanted."""
AHEAD_RANGES = 1024
GAP_NBYTES = 16 << 10
"""Gaps up to this long are read too, rather than with another call."""
MAX_ROWS = 512
"""Read with one call: the kernel takes 1024 buffers, and there are the gaps between."""

Range = tuple[int, int]
"""Offset and number of bytes."""

_gap_memory = empty_aligned((GAP_NBYTES + mmap.PAGESIZE,), np.uint8)
"""Written by all threads, and never read."""


class RangeReader:
    """Reads ranges of an open file, about in the order of ``ranges()``, from several threads.

    What lies in the page cache is copied at once. From the first range that does not, the disk is
    told of the ranges to come (strided boxes were read 3 times faster so), and of no others: by
    default the kernel would read the gaps as well. If ``ranges()`` is None, it does as it likes.

    Systems that know neither reads which do not wait nor advice, such as macOS, simply read.
    """

    def __init__(
        self, file: DataFile, fd: int, ranges: Callable[[], Iterator[Range] | None]
    ) -> None:
        self._file, self._fd = file, fd
        self._ranges = ranges
        self._lock = threading.Lock()
        self._are_gaps_there = True  # in memory, as far as is known
        self._coming: Iterator[Range] | None = None
        self._num_read = self._told_ranges = self._told_nbytes = 0

    def fill_rows(self, rows: Bytes, offset: int, step: int) -> None:
        """Fills each of ``rows``: the first from ``offset`` on, the next from ``step`` later."""
        done, (num, nbytes) = 0, rows.shape
        if num > 1:
            if step - nbytes <= GAP_NBYTES and self._fill_at_once(rows, offset, step):
                return
            done = self._fill_from_memory(rows, offset, step)
            if done == num:
                return
        for number, row in enumerate(rows[done:], done):
            self._fill(row.data, offset + number * step)

    def _fill_from_memory(self, rows: Bytes, offset: int, step: int) -> int:
        """Fills the first of ``rows``, as long as they are in memory; how many those are.

        A loop of little else than the calls themselves, of which a box may need thousands.
        """
        if self._coming is not None or not hasattr(os, "RWF_NOWAIT"):
            return 0
        nbytes, place, fd, flags = rows.shape[1], offset, self._fd, os.RWF_NOWAIT
        buffers = _buffers(rows)  # now: a long row drives all but itself out of the cache
        try:
            for buffer in buffers:
                if os.preadv(fd, buffer, place, flags) != nbytes:
                    break
                place += step
        except OSError:  # not in memory, or a file system that cannot tell
            pass
        done = (place - offset) // step
        self._num_read += done
        return done

    def _fill_at_once(self, rows: Bytes, offset: int, step: int) -> bool:
        """Fills ``rows`` with one call, if the gaps are small and all of it is in memory."""
        nbytes = rows.shape[1]
        gap = step - nbytes
        if not self._are_gaps_there or self._coming is not None:
            return False
        thrown_away = _gap_memory[(offset + nbytes) % mmap.PAGESIZE :][:gap].data
        buffers: list[memoryview] = []
        for row in rows:
            buffers += (row.data, thrown_away)
        count = self._read_at_once(buffers[:-1], offset)
        self._are_gaps_there = count == step * len(rows) - gap
        self._num_read += len(rows) * self._are_gaps_there
        return self._are_gaps_there

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        if self._coming is None:
            done = self._read_at_once([buffer], offset)
        if done < len(buffer):
            self._tell(len(buffer))
            self._file.fill(self._fd, buffer[done:], offset + done)
        self._num_read += 1

    def _read_at_once(self, buffers: list[memoryview], offset: int) -> int:
        """Fills ``buffers`` from memory, without waiting for the disk; how many bytes that were."""
        if not hasattr(os, "RWF_NOWAIT"):
            return 0
        try:
            return os.preadv(self._fd, buffers, offset, os.RWF_NOWAIT)
        except OSError:  # not in memory, or a file system that cannot tell
            return 0

    def _tell(self, nbytes: int) -> None:
        """Tells of ranges as far ahead as we mean to, when ``nbytes`` more are about to be read."""
        with self._lock:
            if self._coming is None:
                ranges = self._ranges()
                self._advise(0, 0, "NORMAL" if ranges is None else "RANDOM")
                self._coming = islice(ranges or (), self._num_read, None)
            while self._told_nbytes < AHEAD_NBYTES and self._told_ranges < AHEAD_RANGES:
                if (found := next(self._coming, None)) is None:
                    break
                self._advise(*found, "WILLNEED")
                self._told_nbytes += found[1]
                self._told_ranges += 1
            self._told_nbytes -= nbytes
            self._told_ranges -= 1

    def _advise(self, offset: int, nbytes: int, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(self._fd, offset, nbytes, getattr(os, f"POSIX_FADV_{advice}"))


def _buffers(rows: Bytes) -> list[tuple[memoryview]]:
    """Each of ``rows``, as ``preadv`` takes it."""
    if not rows.flags.c_contiguous:
        return [(row.data,) for row in rows]
    flat, nbytes = rows.data.cast("B"), rows.shape[1]  # of which parts are made faster
    return [(flat[start : start + nbytes],) for start in range(0, len(flat), nbytes)]
