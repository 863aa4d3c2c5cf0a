"""From a batch of the schedule to this rank's boxes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from hyperslab.errors import CommError, FormatError
from hyperslab.io import Dataset
from hyperslab.io.buffers import BufferPool
from hyperslab.io.schedule import Batch
from hyperslab.store.augment import Augmentation, Symmetry
from hyperslab.store.crew import Crew
from hyperslab.store.memory import MemoryStore, Wish
from hyperslab.store.peers import Peers, settle_failure
from hyperslab.store.placement import Placement
from hyperslab.store.rows import Rows


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
class Reading:
    """A batch on its way from files and from other ranks."""

    batch: Batch
    rows: dict[str, Rows]
    wishes: list[tuple[Wish, NDArray[Any]]]
    fills: list[Future[None]]
    takes: list[Future[None]]


class BatchMaker:
    """Reads batches with a crew of threads, from the files or from the memory of the ranks."""

    def __init__(
        self,
        dataset: Dataset,
        placement: Placement,
        peers: Peers,
        crew: Crew,
        pool: BufferPool,
        store: MemoryStore | None,
        augmentation: Augmentation | None,
    ) -> None:
        self._dataset, self._placement, self._peers = dataset, placement, peers
        self._crew, self._pool, self._store = crew, pool, store
        self._augmentation = augmentation

    def begin(self, batch: Batch, turn_later: bool) -> Reading:
        """Lets a batch be read; its samples are turned on the way, or else left as they are."""
        fills = []
        if self._store:
            fill = self._store.fill
            fills = [self._crew.submit(fill, i) for i in self._store.to_fill(batch.indices)]
        indices = self._taken(batch)
        rows = {name: self._rows(batch, name, turn_later) for name in self._placement.arrays}
        wishes, takes = [], []
        for row, index in enumerate(indices):
            of_sample = [
                (wish, self._place(batch, wish, rows[wish.array], row))
                for wish in self._wishes(batch, index, self._placement.rank)
            ]
            wishes += of_sample
            takes.append(self._crew.submit(self._take, of_sample))
        return Reading(batch, rows, wishes, fills, takes)

    def finish(self, reading: Reading) -> LocalBatch:
        """Collective over all ranks: they skip the same samples, or stop at the same one."""
        errors = [fill.exception() for fill in reading.fills]
        faults, failure = {}, None
        if self._store:
            batch = reading.batch
            wishes_of = partial(self._wishes, batch)
            self._store.swap(batch.indices, reading.wishes, wishes_of)
            faults = self._store.faults(batch.indices)
            failure = self._store.failure(batch.indices)
        for index, take in zip(self._taken(reading.batch), reading.takes, strict=True):
            error = take.exception()
            if isinstance(error, FormatError):
                faults[index] = str(error)
            elif isinstance(error, CommError):  # there is nobody to settle it with
                raise error
            elif error:
                errors.append(error)
                failure = failure or f"{type(error).__name__}: {error}"
        cause = next(filter(None, errors), None)
        return self._without(reading, settle_failure(self._peers, faults, failure, cause))

    def _without(self, reading: Reading, faults: dict[int, str]) -> LocalBatch:
        batch, spans = reading.batch, self._placement.spans(len(reading.batch.indices))
        if not faults:
            return LocalBatch(batch, reading.rows, tuple([span.size for span in spans]), {})
        good = [
            [row for row, index in enumerate(batch.indices[a:b]) if index not in faults]
            for a, b in spans
        ]
        rows, mine = reading.rows, good[self._placement.share]
        if len(mine) < spans[self._placement.share].size:
            rows = {name: of_array.only(mine) for name, of_array in rows.items()}
        skipped = {index: faults[index] for index in batch.indices if index in faults}
        return LocalBatch(batch, rows, tuple(map(len, good)), skipped)

    def _taken(self, batch: Batch) -> Sequence[int]:
        """The samples that come to this rank."""
        span = self._placement.spans(len(batch.indices))[self._placement.share]
        return batch.indices[span.start : span.stop]

    def _wishes(self, batch: Batch, index: int, rank: int) -> list[Wish]:
        """What ``rank`` takes of a sample: the pre-images of its boxes."""
        wishes = []
        for name, spec in self._placement.arrays.items():
            box = self._placement.box(name, rank)
            if symmetry := self._symmetry(batch, index, name):
                box = symmetry.source(box, spec)
            wishes.append(Wish(index, name, box))
        return wishes

    def _rows(self, batch: Batch, array: str, turn_later: bool) -> Rows:
        spec, shape = self._placement.arrays[array], self._placement.box(array).shape
        indices = self._taken(batch)
        memory = self._pool.take((len(indices), math.prod(shape)), spec.dtype)
        later = [self._symmetry(batch, index, array) for index in indices if turn_later]
        return Rows(spec, shape, memory, tuple(filter(None, later)))

    def _place(self, batch: Batch, wish: Wish, rows: Rows, row: int) -> NDArray[Any]:
        """What a wish is to fill."""
        place = rows.place(row)
        symmetry = None if rows.turns else self._symmetry(batch, wish.index, wish.array)
        return symmetry.view(place) if symmetry else place

    def _symmetry(self, batch: Batch, index: int, array: str) -> Symmetry | None:
        if self._augmentation is None or not self._placement.arrays[array].is_cut:
            return None
        return self._augmentation.symmetry(batch.seed, batch.at.epoch, index)

    def _take(self, wishes: Sequence[tuple[Wish, NDArray[Any]]]) -> None:
        for wish, out in wishes:
            if self._store:
                self._store.take(wish, out)
            else:
                self._dataset.read(wish.index, wish.box, out=out, array=wish.array)
