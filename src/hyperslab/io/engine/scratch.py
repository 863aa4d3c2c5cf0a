"""Memory for what is made of a chunk on its way from the file to the buffer."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hyperslab.io.engine.buffers import empty_aligned

KEPT_NBYTES = 64 * 2**20
"""That a thread keeps for its next chunk; new memory costs several times as much as a copy."""

Bytes = NDArray[np.uint8]


class Scratch(threading.local):
    """Memory that is used again and again; each thread has its own."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []
        self._lent: list[Bytes] = []

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """At its end, all memory that was taken within it is taken back."""
        outer, self._lent = self._lent, []
        try:
            yield
        finally:
            mine, self._lent = self._lent, outer
            self._spare = (mine + self._spare)[:8]
            while sum(memory.nbytes for memory in self._spare) > KEPT_NBYTES:
                self._spare.pop()

    def take(self, nbytes: int, like_offset: int = 0) -> Bytes:
        """Memory with arbitrary contents, for use within ``borrowed``.

        It lies in its page as ``like_offset`` does in one of a file: so the kernel copies fastest.
        """
        start = like_offset % mmap.PAGESIZE
        fitting = [m.nbytes for m in self._spare if m.nbytes >= start + nbytes]
        if fitting:
            sizes = [memory.nbytes for memory in self._spare]
            memory = self._spare.pop(sizes.index(min(fitting)))
        else:
            memory = empty_aligned((start + nbytes,), np.uint8)
        self._lent.append(memory)
        return memory[start : start + nbytes]


scratch = Scratch()
