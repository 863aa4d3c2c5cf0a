"""The threads that read and decode pieces of a box."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Generic, TypeVar

from hyperslab.errors import ConfigError
from hyperslab.trace import active

T = TypeVar("T")

MAX_DEFAULT = 32
"""More threads than this bring nothing to one box, on however many cores."""


def for_each(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Calls ``work`` on each of ``items``, on several threads at once.

    The calling thread works too, and waits for nobody who has not begun: reads that call this from
    many threads, or from each other, always end. The first error stops the rest and is raised.
    """
    rest = iter(items)
    first_two = list(islice(rest, 2))
    if len(first_two) < 2 or num_threads() == 1:
        for item in (*first_two, *rest):
            work(item)
        return
    _Job(work, first_two, rest).run(num_threads() - 1)


def num_threads() -> int:
    """How many threads work on one box, the calling one included."""
    return _pool.size


def set_num_threads(num: int | None) -> None:
    """Lets ``num`` threads work on one box; None means one for each core this process may use."""
    if num is not None and num < 1:
        raise ConfigError(f"the number of threads must be at least 1, got {num}")
    _pool.size = _num_cores() if num is None else num


@contextmanager
def limited_to(num: int) -> Iterator[None]:
    """Within it, ``num`` threads work on one box, in the whole process."""
    before = num_threads()
    set_num_threads(num)
    try:
        yield
    finally:
        set_num_threads(before)


def _num_cores() -> int:
    # Not on every system is a process bound to cores.
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_DEFAULT, bound or 1)


class _Job(Generic[T]):
    """Items that several threads take in turn, until none is left or one has failed."""

    def __init__(self, work: Callable[[T], None], first: list[T], rest: Iterator[T]) -> None:
        self._work = work
        self._first, self._rest = first, rest
        self._lock = threading.Lock()
        self._stopped = False
        self._place = active.place_here()

    def run(self, num_helpers: int) -> None:
        helpers = _pool.submit(self._help, num_helpers)
        try:
            self._drain()
        finally:  # also by Ctrl-C
            self._stopped = True
            begun = [helper for helper in helpers if not helper.cancel()]
            failures = [helper.exception() for helper in begun]
        for failure in failures:
            if failure is not None:
                raise failure

    def _help(self) -> None:
        with active.placed(self._place):
            self._drain()

    def _drain(self) -> None:
        try:
            for item in iter(self._take, None):
                self._work(item[0])
        except BaseException:
            self._stopped = True
            raise

    def _take(self) -> tuple[T] | None:
        with self._lock:
            if self._stopped:
                return None
            if self._first:
                return (self._first.pop(0),)
            return next(((item,) for item in self._rest), None)


class _Pool:
    """Threads made when they are first needed, and again in a forked child, which has none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._capacity = 0

    def submit(self, work: Callable[[], None], num: int) -> list[Future[None]]:
        """``work`` on up to ``num`` threads; on none while the interpreter shuts down."""
        with self._lock:
            if self._executor is None or num > self._capacity:
                before, self._capacity = self._executor, num
                self._executor = ThreadPoolExecutor(self._capacity, "hyperslab-read")
                if before is not None:
                    before.shutdown(wait=False)  # what it has begun is finished
            try:
                return [self._executor.submit(work) for _ in range(num)]
            except RuntimeError:
                return []


_pool = _Pool(_num_cores())


class ForkSafeLock:
    """A lock that is free in a forked process, whoever held it in the parent.

    The threads of the parent do not come along to let go of theirs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _fork_safe_locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = threading.Lock()


_fork_safe_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    global _pool
    _pool = _Pool(_pool.size)
    for lock in _fork_safe_locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
