"""Many processes that compile kernels, into Triton's cache on disk, before these are timed."""

import os
import sys
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def run_ahead(
    function: Callable[[Item], object], items: Iterable[Item], *, seconds: float
) -> set[Item]:
    """The items with which ``function``, in other processes, was done in time, or failed."""
    processes = max(1, (os.cpu_count() or 2) - 2)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))  # no fork has CUDA
    futures = {pool.submit(function, item): item for item in items}
    done = wait(futures, seconds).done
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(done)} of {len(futures)} are compiled", file=sys.stderr, flush=True)
    return {futures[future] for future in done}
