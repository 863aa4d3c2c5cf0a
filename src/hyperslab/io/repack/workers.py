"""Processes that each rewrite one file at a time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from hyperslab.io.meter import Meter
from hyperslab.io.partial import WriteError, partials, remove_leftovers
from hyperslab.io.repack.write import Done, Job, repack_file

POLL_SECONDS = 0.2
GRACE_SECONDS = 2.0


def run_jobs(jobs: Sequence[Job], num_processes: int, meter: Meter) -> list[Done]:
    """Does ``jobs``; the first error stops the rest. Nothing half-written is left behind.

    The HDF5 library may crash over a damaged file: another process, not this one, then dies of it.
    With 0 processes the work is done here.
    """
    if not num_processes or not jobs:
        return [repack_file(job, meter.add) for job in jobs]
    # Not by fork: this process may have threads, and locks that they hold.
    context = get_context("spawn")
    counter = context.Value("q", 0)
    before = active_children()
    pool = ProcessPoolExecutor(
        min(num_processes, len(jobs)), context, initializer=_begin, initargs=(counter,)
    )
    try:
        done = _collect([pool.submit(_run, job) for job in jobs], counter, meter)
    except BaseException as error:  # also by Ctrl-C
        dead = _obituary(jobs) if isinstance(error, BrokenProcessPool) else None
        _end([child for child in active_children() if child not in before])
        pool.shutdown(cancel_futures=True)
        remove_leftovers(_folders(jobs))
        if dead:
            raise WriteError(dead) from error
        raise
    pool.shutdown()
    return done


def _end(children: Sequence[BaseProcess]) -> None:
    for child in children:
        child.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
        if child.exitcode is None:  # deep in the HDF5 library, which hears no signals
            child.kill()


def _obituary(jobs: Sequence[Job]) -> str:
    """What to say of a process that died, by what it has left."""
    left = {path.name for folder in _folders(jobs) for path in partials(folder)}
    busy = [
        str(job.source)
        for job in jobs
        if any(name.startswith(f".{job.target.name}.") for name in left)
    ]
    return (
        f"a process that repacked {' or '.join(busy) or 'files'} was killed or crashed: there may "
        "be too little memory (use fewer jobs), or a file may be damaged"
    )


def _folders(jobs: Sequence[Job]) -> set[Path]:
    return {job.target.parent for job in jobs}


def _collect(futures: list[Future[Done]], counter: Synchronized[int], meter: Meter) -> list[Done]:
    waiting = set(futures)
    while waiting:
        ready, waiting = wait(waiting, POLL_SECONDS)
        for future in ready:
            future.result()
        meter.add(counter.value - meter.done)
    return [future.result() for future in futures]


# In the processes


_counter: Any = None
_is_busy = False


def _begin(counter: Synchronized[int]) -> None:
    """In a new process: Ctrl-C is for the parent, which then ends us, as does its death."""
    global _counter
    _counter = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _leave(*_: object) -> None:
    """Ends this process; a half-written file is removed first."""
    if _is_busy:
        raise SystemExit
    os._exit(1)


def _run(job: Job) -> Done:
    global _is_busy
    _is_busy = True
    try:
        return repack_file(job, _advance)
    except SystemExit:  # the pool would take it for the result, and go on
        os._exit(1)
    finally:
        _is_busy = False


def _advance(nbytes: int) -> None:
    with _counter.get_lock():
        _counter.value += nbytes
