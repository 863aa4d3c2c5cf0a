"""One thread at a time, where ranks exchange messages in the order in which they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError

_lock = threading.RLock()


@contextmanager
def one_thread(mesh: Mesh) -> Iterator[None]:
    """Within it, other threads that want the same raise ``ConfigError``; one rank does not mind."""
    if mesh.num_ranks == 1:
        yield
        return
    if not _lock.acquire(blocking=False):
        raise ConfigError(
            f"two threads of rank {mesh.rank} run parallelized modules at once: their messages to "
            f"the other ranks ({mesh.num_ranks - 1}) would mix; let one wait for the other, in the "
            "same order on all ranks"
        )
    try:
        yield
    finally:
        _lock.release()
