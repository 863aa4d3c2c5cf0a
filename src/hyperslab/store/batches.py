"""From a batch of the schedule to this rank's boxes of it, which reader threads read."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import CommError, FormatError
from hyperslab.io import ArraySpec, Dataset
from hyperslab.io.engine.buffers import BufferPool
from hyperslab.io.schedule import Batch
from hyperslab.store.augment import Augmentation, Symmetry
from hyperslab.store.memory import MemoryStore, Request
from hyperslab.store.peers import Peers, settle_failure
from hyperslab.store.placement import Placement
from hyperslab.trace import active
from hyperslab.trace.recorder import Place


@dataclass(frozen=True)
class Rows:
    """This rank's box of every sample that came to it.

    Samples are turned as their rows are filled, or later: until then a row holds the pre-image of
    its box, which may have another shape, but as many elements.
    """

    spec: ArraySpec
    shape: tuple[int, ...]
    """Of the boxes, channels first."""
    memory: NDArray[Any]
    """(samples, elements), those of a sample in the file's order of dims."""
    turns: tuple[Symmetry, ...] = ()
    """What is yet to be done with each sample, if anything is."""

    def place(self, row: int) -> NDArray[Any]:
        """The memory of a sample, with the shape that is to be filled, channels first."""
        shape = self.turns[row].source_shape(self.shape) if self.turns else self.shape
        return self._laid_out(self.memory[row : row + 1], shape)[0, ...]

    @property
    def boxes(self) -> NDArray[Any]:
        """(samples, channels, ...), where nothing is left to be turned."""
        assert not self.turns
        return self._laid_out(self.memory, self.shape)

    def _laid_out(self, memory: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        axes = self.spec.axes
        in_file = memory.reshape(len(memory), *axes.in_file_order(shape))
        return in_file.transpose(0, *(1 + dim for dim in axes.order))

    def only(self, rows: Sequence[int]) -> Rows:
        kept = tuple(self.turns[row] for row in rows) if self.turns else ()
        return replace(self, memory=self.memory[list(rows)], turns=kept)


Task = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class ReaderThreads:
    """Takes tasks in the order given. Its threads never keep an interpreter from ending."""

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        name, args = "hyperslab-reader", (self._tasks,)
        self._threads = [
            threading.Thread(target=_work, args=args, name=name, daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        self._tasks.put((future, call, args))
        return future

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Lets tasks that have begun end, and drops the others."""
        while not self._tasks.empty():
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a loader may be forgotten there
                thread.join(timeout_seconds)


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while task := tasks.get():
        future, call, args = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        del task, future, call, args  # buffers go back to their pool now, not with the next task


@dataclass(frozen=True)
class LocalBatch:
    """This rank's boxes of the samples that came to it, and how many came to each share."""

    batch: Batch
    rows: dict[str, Rows]
    """By the name of the array."""
    sizes: tuple[int, ...]
    skipped: dict[int, str]
    """Samples that no rank took because one could not read them, and why."""


@dataclass(frozen=True)
class PendingBatch:
    """A batch on its way from files and from other ranks."""

    batch: Batch
    rows: dict[str, Rows]
    requests: list[tuple[Request, NDArray[Any]]]
    fills: list[Future[None]]
    takes: list[Future[None]]


class BatchReader:
    """Reads batches by threads, from the files or from the memory of the ranks."""

    def __init__(
        self,
        dataset: Dataset,
        placement: Placement,
        peers: Peers,
        readers: ReaderThreads,
        pool: BufferPool,
        store: MemoryStore | None,
        augmentation: Augmentation | None,
    ) -> None:
        self._dataset, self._placement, self._peers = dataset, placement, peers
        self._readers, self._pool, self._store = readers, pool, store
        self._augmentation = augmentation

    def begin(self, batch: Batch, number: int, turn_later: bool) -> PendingBatch:
        """Lets batch ``number`` be read; its samples are turned on the way, or left as they are."""
        fills = []
        if self._store:
            new = self._store.to_fill(batch.indices)
            fills = [self._submit((batch, number, i), self._store.fill, i) for i in new]
        indices = self._taken(batch)
        rows = {name: self._rows(batch, name, turn_later) for name in self._placement.arrays}
        requests, takes = [], []
        for row, index in enumerate(indices):
            of_sample = [
                (request, self._place(batch, request, rows[request.array], row))
                for request in self._requests(batch, index, self._placement.rank)
            ]
            requests += of_sample
            takes.append(self._submit((batch, number, index), self._take, of_sample))
        return PendingBatch(batch, rows, requests, fills, takes)

    def _submit(
        self, what: tuple[Batch, int, int], call: Callable[..., None], *args: Any
    ) -> Future[None]:
        """Has a thread call it; a trace tells for what batch, its number, and what sample."""
        if active.recorder is None:
            return self._readers.submit(call, *args)
        batch, number, index = what
        return self._readers.submit(_call_at, Place(batch.at.epoch, number, index), call, *args)

    def finish(self, pending: PendingBatch) -> LocalBatch:
        """Collective over all ranks: they skip the same samples, or stop at the same one."""
        errors = [fill.exception() for fill in pending.fills]
        faults, failure = {}, None
        if self._store:
            batch = pending.batch
            requests_of = partial(self._requests, batch)
            self._store.swap(batch.indices, pending.requests, requests_of)
            faults = self._store.faults(batch.indices)
            failure = self._store.failure(batch.indices)
        for index, take in zip(self._taken(pending.batch), pending.takes, strict=True):
            error = take.exception()
            if isinstance(error, FormatError):
                faults[index] = str(error)
            elif isinstance(error, CommError):  # there is nobody to settle it with
                raise error
            elif error:
                errors.append(error)
                failure = failure or f"{type(error).__name__}: {error}"
        cause = next(filter(None, errors), None)
        return self._without(pending, settle_failure(self._peers, faults, failure, cause))

    def _without(self, pending: PendingBatch, faults: dict[int, str]) -> LocalBatch:
        batch, spans = pending.batch, self._placement.spans(len(pending.batch.indices))
        if not faults:
            return LocalBatch(batch, pending.rows, tuple([span.size for span in spans]), {})
        good = [
            [row for row, index in enumerate(batch.indices[a:b]) if index not in faults]
            for a, b in spans
        ]
        rows, mine = pending.rows, good[self._placement.share]
        if len(mine) < spans[self._placement.share].size:
            rows = {name: of_array.only(mine) for name, of_array in rows.items()}
        skipped = {index: faults[index] for index in batch.indices if index in faults}
        return LocalBatch(batch, rows, tuple(map(len, good)), skipped)

    def _taken(self, batch: Batch) -> Sequence[int]:
        """The samples that come to this rank."""
        span = self._placement.spans(len(batch.indices))[self._placement.share]
        return batch.indices[span.start : span.stop]

    def _requests(self, batch: Batch, index: int, rank: int) -> list[Request]:
        """What ``rank`` takes of a sample: the pre-images of its boxes."""
        requests = []
        for name, spec in self._placement.arrays.items():
            box = self._placement.box(name, rank)
            if symmetry := self._symmetry(batch, index, name):
                box = symmetry.source(box, spec)
            requests.append(Request(index, name, box))
        return requests

    def _rows(self, batch: Batch, array: str, turn_later: bool) -> Rows:
        spec, shape = self._placement.arrays[array], self._placement.box(array).shape
        indices = self._taken(batch)
        memory = self._pool.take((len(indices), math.prod(shape)), spec.dtype)
        later = [self._symmetry(batch, index, array) for index in indices if turn_later]
        return Rows(spec, shape, memory, tuple(filter(None, later)))

    def _place(self, batch: Batch, request: Request, rows: Rows, row: int) -> NDArray[Any]:
        """What a request is to fill."""
        place = rows.place(row)
        symmetry = None if rows.turns else self._symmetry(batch, request.index, request.array)
        return symmetry.view(place) if symmetry else place

    def _symmetry(self, batch: Batch, index: int, array: str) -> Symmetry | None:
        if self._augmentation is None or not self._placement.arrays[array].is_cut:
            return None
        return self._augmentation.symmetry(batch.seed, batch.at.epoch, index)

    def _take(self, requests: Sequence[tuple[Request, NDArray[Any]]]) -> None:
        for request, out in requests:
            if self._store:
                self._store.take(request, out)
            else:
                self._dataset.read(request.index, request.box, out=out, array=request.array)


def _call_at(place: Place, call: Callable[..., None], *args: Any) -> None:
    with active.placed(place):
        call(*args)


def find_not_finite(
    dataset: Dataset, placement: Placement, indices: Sequence[int]
) -> tuple[int, str] | None:
    """The first of the samples with a NaN or an infinity in this rank's boxes, if there is one.

    Given are its place in ``indices`` and what is wrong in words. Samples that cannot be read are
    left out.
    """
    for place, index in enumerate(indices):
        for name, spec in placement.arrays.items():
            if spec.dtype.kind not in "fc":
                continue
            try:
                values = dataset.read(index, placement.box(name), array=name)
            except FormatError:
                continue
            if (bad := ~np.isfinite(values)).any():
                path, number = dataset.place_of(index)
                return place, (
                    f"{dataset.name_of(index)} (number {number} in {path}) holds "
                    f"{values[bad][0]} in array {name!r}"
                )
    return None
