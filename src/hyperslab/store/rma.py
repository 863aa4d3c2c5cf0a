"""Slots of ranks on other nodes, read by MPI without their help."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.layout import Grid


class Window:
    """The memory of every rank, open to the others between two fences.

    Making one and ``get`` are collective over all ranks. The thread of the loader calls ``get``, so
    MPI must allow calls from any one thread at a time, and from several for several loaders.
    """

    def __init__(self, memory: NDArray[np.uint8], grid: Grid, rank: int) -> None:
        mpi = _mpi()
        num_ranks = mpi.COMM_WORLD.Get_size()
        if num_ranks != grid.num_ranks:
            raise ConfigError(
                f"transport='mpi' needs ranks that MPI started: the mesh has {grid.num_ranks}, MPI "
                f"knows of {num_ranks}; start with mpirun or srun, or use transport='torch'"
            )
        _check_threads(mpi)
        self._comm = mpi.COMM_WORLD.Split(0, rank)
        try:
            self._window = mpi.Win.Create(memory, 1, comm=self._comm)
        except mpi.Exception as error:
            raise ConfigError(
                f"this MPI cannot open memory to other ranks ({error}): use transport='torch'"
            ) from error
        _windows.add(self)

    def get(self, wanted: Sequence[tuple[int, int, NDArray[np.uint8]]]) -> None:
        """Fills each array with the bytes at an offset in the memory of a rank."""
        self._window.Fence()
        for rank, offset, out in wanted:
            self._window.Get(out, rank, target=(offset, out.nbytes, _mpi().BYTE))
        self._window.Fence()


_windows: weakref.WeakSet[Window] = weakref.WeakSet()


def _check_threads(mpi: Any) -> None:
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        raise ConfigError("transport='mpi' needs an MPI that threads may call in turn")
    if level < mpi.THREAD_MULTIPLE and len(_windows):
        raise ConfigError(
            "another loader uses transport='mpi', and this MPI allows one thread at a time: close "
            "that one first, or use transport='torch' for one of them"
        )


def _mpi() -> Any:
    try:
        import mpi4py

        # Not every way of Open MPI to open memory allows several threads at once.
        mpi4py.rc.thread_level = "serialized"  # heeded where MPI has not begun yet
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            f"transport='mpi' needs mpi4py and an MPI library ({error}): pip install "
            "'hyperslab[mpi]', or use transport='torch'"
        ) from error
    return MPI
