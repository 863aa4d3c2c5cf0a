"""GPU work that is recorded once, in CUDA graphs, and replayed with one launch."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from hyperslab.torch_private import current_stream_key, release_graph_pool

Made = TypeVar("Made")

_broken: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed. Torch's allocators still ask them which streams were theirs."""


_WAIT = "synchronizing CUDA operation"


class CudaRecorder:
    """Records CUDA graphs that share their memory, of which one at a time may hold something."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side, self._latest = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        self._latest_key = current_stream_key(device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._renew()

    def _renew(self) -> None:
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def practice(self) -> Iterator[None]:
        """A context for work that prepares a recording: as there, on a stream of its own."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what other streams have let go
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._side):
                yield
        finally:  # or what is put back after a failure would be overwritten
            torch.cuda.synchronize(self._device)

    @contextmanager
    def watch_for_waits(self) -> Iterator[list[str]]:
        """A context that gives a list, to which it adds where the host waits for the device.

        Torch tells of all its own functions that wait but ``torch.cuda.synchronize``.
        """
        places: list[str] = []
        here, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()
        show = warnings.showwarning

        def note(message: Any, category: Any, file: str, line: int, *rest: Any) -> None:
            if _WAIT not in str(message):
                show(message, category, file, line, *rest)
            elif threading.get_ident() == here:
                places.append(f"{file}:{line}")

        with warnings.catch_warnings():
            warnings.filterwarnings("always", f".*{_WAIT}")
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            warnings.showwarning = note  # type: ignore[assignment]  # restored at the end
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def record(self, run: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        """What ``run`` returns, and what runs its work again, into the same memory.

        The memory may be overwritten by whatever else this recorder's recordings run.
        """
        if not self._graphs:
            self._renew()  # torch does not take up a pool again whose graphs are all gone
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        mode = "thread_local"  # other threads, which may load data, do not disturb it
        # Where the recording cannot be ended, torch.cuda.graph leaves its stream current.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            try:
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode=mode):
                    out = run()
            except BaseException:
                self._mend(graph)
                raise
        self._graphs.add(graph)
        return out, graph.replay

    def follow(self) -> None:
        """Has the current stream wait for what others still do with that memory."""
        key = current_stream_key(self._device)
        if key != self._latest_key:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._latest)
            self._latest, self._latest_key = current, key

    def _mend(self, graph: torch.cuda.CUDAGraph) -> None:
        """Has torch go on as before, after the recording of ``graph`` failed."""
        try:
            graph.pool()
        except RuntimeError:  # it was not even ended
            _broken.append(graph)
            graph.reset()
            with suppress(RuntimeError):  # where it had not even begun
                index = torch.cuda.current_device()
                release_graph_pool(index, self._pool)
            self._renew()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                torch.zeros((), device=self._device)  # random numbers can be drawn again
