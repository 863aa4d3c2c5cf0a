"""Memory that files are read into."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Bytes = NDArray[np.uint8]
KEPT_NBYTES = 64 * 2**20
"""That a thread keeps for its next chunk; new memory costs several times as much as a copy."""


def empty_aligned(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """An array whose memory begins on a page, as the kernel copies fastest into such."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def address_of(memory: NDArray[Any]) -> int:
    """Of the first item: by ``ctypes``, as ``__array_interface__`` takes three times as long."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not in C order, or of a dtype that only NumPy knows
        return int(memory.__array_interface__["data"][0])


class BufferPool:
    """Page-aligned memory that is used again once nothing refers to it.

    A buffer comes back by itself, when the last array or tensor that views it is gone; until then
    it belongs to whoever keeps one. New memory costs several times as much as reading into it, for
    the kernel's page faults. Safe to use from many threads.

    Args:
        max_spare_nbytes: Buffers that wait to be used again are freed beyond this, oldest first.
        on_new: Called with the bytes of every new buffer, to pin them for a GPU.
        on_free: Called with the same bytes before they are freed.
    """

    def __init__(
        self,
        *,
        max_spare_nbytes: int = 4 << 30,
        on_new: Callable[[Bytes], None] | None = None,
        on_free: Callable[[Bytes], None] | None = None,
    ) -> None:
        self._max_spare_nbytes = max_spare_nbytes
        self._on_new, self._on_free = on_new, on_free
        self._lock = threading.Lock()
        self._spare: list[Bytes] = []
        # Buffers come back in the midst of anything, garbage collection under our lock included;
        # a deque takes them without one.
        self._returned: deque[Bytes] = deque()

    @property
    def spare_nbytes(self) -> int:
        """Of the buffers that wait to be used again."""
        with self._lock:
            return sum(memory.nbytes for memory in self._spare)

    def take(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array whose contents are arbitrary."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        memory = self._fitting_spare(nbytes)
        if memory is None:
            memory = self._new(nbytes)
        # Views refer to the array that owns the memory, as NumPy sees it: a new one each time,
        # which must not be a view of ``memory``.
        owner = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return owner.view(dtype).reshape(shape)

    def close(self) -> None:
        """Frees the spare buffers; those still in use are freed as they come back."""
        self._max_spare_nbytes = 0
        with self._lock:
            dropped, self._spare = self._spare, []
        self._free(dropped)
        self._settle()

    def _fitting_spare(self, nbytes: int) -> Bytes | None:
        """The smallest spare buffer that is large enough, and not half empty."""
        self._settle()
        with self._lock:
            fitting = [
                (memory.nbytes, number)
                for number, memory in enumerate(self._spare)
                if nbytes <= memory.nbytes <= 2 * max(nbytes, mmap.PAGESIZE)
            ]
            return self._spare.pop(min(fitting)[1]) if fitting else None

    def _new(self, nbytes: int) -> Bytes:
        memory = empty_aligned((-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE,), np.uint8)
        memory[:: mmap.PAGESIZE] = 0  # a page fault each, now rather than in the first read
        if self._on_new is not None:
            self._on_new(memory)
        return memory

    def _give_back(self, memory: Bytes) -> None:
        self._returned.append(memory)
        self._settle()

    def _settle(self) -> None:
        """Makes what has come back spare, unless someone else is at it, who then does it for us."""
        while self._returned and self._lock.acquire(blocking=False):
            dropped: list[Bytes] = []
            try:
                while self._returned:
                    self._spare.append(self._returned.popleft())
                while self._spare and self._excess_nbytes() > 0:
                    dropped.append(self._spare.pop(0))
            finally:
                self._lock.release()
            self._free(dropped)

    def _excess_nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._spare) - self._max_spare_nbytes

    def _free(self, dropped: list[Bytes]) -> None:
        if self._on_free is not None:
            for memory in dropped:
                self._on_free(memory)


class Scratch(threading.local):
    """Memory that is used again and again; each thread has its own."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []
        self._lent: list[Bytes] = []

    def borrowed(self) -> _Loan:
        """At its end, all memory that was taken within it is taken back."""
        return _Loan(self)

    def begin_loan(self) -> list[Bytes]:
        """From now on, what is taken belongs to a new loan; gives the one before."""
        before, self._lent = self._lent, []
        return before

    def end_loan(self, before: list[Bytes]) -> None:
        self._spare = (self._lent + self._spare)[:8]
        self._lent = before
        while sum([memory.nbytes for memory in self._spare]) > KEPT_NBYTES:
            self._spare.pop()

    def take(self, nbytes: int, like_offset: int = 0) -> Bytes:
        """Memory with arbitrary contents, for use within ``borrowed``.

        It lies in its page as ``like_offset`` does in one of a file: so the kernel copies fastest.
        """
        start = like_offset % mmap.PAGESIZE
        sizes = [memory.nbytes for memory in self._spare]
        fitting = [(size, n) for n, size in enumerate(sizes) if size >= start + nbytes]
        if fitting:
            memory = self._spare.pop(min(fitting)[1])
        else:
            memory = empty_aligned((start + nbytes,), np.uint8)
        self._lent.append(memory)
        return memory[start : start + nbytes]


class _Loan:
    """What ``Scratch.borrowed`` gives; a generator would take twice the calls, for every chunk."""

    __slots__ = ("_before", "_scratch")

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def __enter__(self) -> None:
        self._before = self._scratch.begin_loan()

    def __exit__(self, *error: object) -> None:
        self._scratch.end_loan(self._before)


scratch = Scratch()
