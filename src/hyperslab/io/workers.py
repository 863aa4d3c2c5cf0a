"""Processes that write files: they end with this one, and leave nothing half-written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

from hyperslab.partial import remove_leftovers, remove_open

SubmitAll = Callable[[Callable[[Any], Any], Iterable[Any]], list[Future[Any]]]
"""Has a function called with each of some arguments, by whichever process is free."""


@contextmanager
def worker_processes(
    num: int, folders: Iterable[Path], begin: Callable[[], object] | None = None
) -> Iterator[SubmitAll]:
    """``num`` processes, each of which calls ``begin`` first, if there is one.

    They stop at once where the block is left by an error, and what they have half written in
    ``folders`` is removed. A process that crashes does not take this one with it.
    """
    before = active_children()
    # Spawned, not forked: this process may have threads, and locks that they hold.
    pool = ProcessPoolExecutor(num, get_context("spawn"), _end_with_parent, (begin,))

    def submit_all(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Future[Any]]:
        with _later(signal.SIGINT):
            return [pool.submit(function, item) for item in items]

    try:
        yield submit_all
    except BaseException:  # also by Ctrl-C
        started = [child for child in active_children() if child not in before]
        for child in started:
            child.kill()
        for child in started:
            child.join()
        pool.shutdown(cancel_futures=True)
        remove_leftovers(folders)
        raise
    pool.shutdown()


@contextmanager
def _later(number: int) -> Iterator[None]:
    """Holds a signal back until the end of the block; processes started inside never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(begin: Callable[[], object] | None) -> None:
    """In a new process, which would wait for work for ever if its parent was killed."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        remove_open()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if begin is not None:
        begin()
