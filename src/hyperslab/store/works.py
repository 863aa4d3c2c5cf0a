"""What works for a loader behind the scenes, and ends with it."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, Protocol

from hyperslab.errors import CommError, ConfigError
from hyperslab.io.engine.buffers import BufferPool
from hyperslab.io.schedule import Batch, Position, Schedule
from hyperslab.store.crew import Crew
from hyperslab.store.maker import BatchMaker, LocalBatch, Reading
from hyperslab.store.memory import MemoryStore
from hyperslab.store.peers import Peers, settle_failure
from hyperslab.store.pipeline import Pipeline

MAX_READERS = 8
PATIENCE_SECONDS = 5.0
"""How long a loader that is closed waits for those of other ranks."""
Delivered = tuple[LocalBatch, Any]


class Deliver(Protocol):
    """Makes of a batch what is taken."""

    @property
    def turns(self) -> bool:
        """Whether it turns samples itself, which come to it as they were read."""
        ...

    def __call__(self, local: LocalBatch) -> Any: ...


class Works:
    """Threads, buffers, the store, and the pipeline that is running, if one is."""

    def __init__(
        self,
        maker: BatchMaker,
        peers: Peers,
        crew: Crew,
        pool: BufferPool,
        store: MemoryStore | None,
        prefetch: int,
    ) -> None:
        self._maker, self._peers, self._crew, self._pool = maker, peers, crew, pool
        self._store, self._prefetch = store, prefetch
        self._pid = os.getpid()
        self._pipeline: Pipeline[Batch, Reading, Delivered] | None = None
        self._goes_on_at: tuple[Position, Schedule, Deliver] | None = None

    def start(self, at: Position, schedule: Schedule, deliver: Deliver) -> None:
        """Lets batches from ``at`` on be made, unless they already are.

        Collective over all ranks.
        """
        if self._goes_on_at == (at, schedule, deliver):
            return
        self.end_pipeline()
        self._check_alike(at, schedule)
        maker = self._maker

        def finish(reading: Reading) -> Delivered:
            local = maker.finish(reading)
            return local, deliver(local)

        batches = schedule.batches(at)
        begin = partial(maker.begin, turn_later=deliver.turns)
        self._pipeline = Pipeline(batches, begin, finish, self._prefetch)
        self._goes_on_at = (at, schedule, deliver)

    def take(self) -> Delivered:
        """The next batch, as it was delivered."""
        assert self._pipeline is not None
        assert self._goes_on_at is not None
        if os.getpid() != self._pid:
            raise ConfigError(
                f"the loader belongs to process {self._pid}, and its threads did not come along "
                f"into process {os.getpid()}: make another loader here"
            )
        local, delivered = self._pipeline.take()
        self._goes_on_at = (local.batch.next, *self._goes_on_at[1:])
        return local, delivered

    def _check_alike(self, at: Position, schedule: Schedule) -> None:
        everywhere = self._peers.tell_all((at, schedule))
        for rank, theirs in enumerate(everywhere):
            if theirs != everywhere[0]:
                raise CommError(
                    f"rank 0 goes on at {_shown(*everywhere[0])}, rank {rank} at {_shown(*theirs)}:"
                    " give the loaders of all ranks the same arguments and the same saved state, "
                    "and leave a loop over one at the same step"
                )

    def preload(self, show: bool) -> None:
        """Fills all slots of this rank's store. Collective over all ranks."""
        assert self._store is not None
        store, crew = self._store, self._crew
        indices = store.fill_all()
        fills = [crew.submit(store.fill, index) for index in indices]
        shown = _tracked(fills, "Loading samples into memory") if show else fills
        errors = [fill.exception() for fill in shown]
        cause = next(filter(None, errors), None)
        settle_failure(self._peers, {}, store.failure(indices), cause)

    def end_pipeline(self, timeout_seconds: float | None = None) -> bool:
        """Ends it where the other ranks do, so that none is left in the midst of a message.

        After ``timeout_seconds`` it is taken that the others never will, and it has not ended.
        """
        pipeline, self._pipeline, self._goes_on_at = self._pipeline, None, None
        if pipeline is None:
            return True
        if self._peers.grid.num_ranks > 1:
            pipeline.drain(timeout_seconds)
        pipeline.stop()
        return pipeline.has_ended

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        if self.end_pipeline(PATIENCE_SECONDS):
            self._peers.close()
        if self._store:
            self._store.stop_waiting()
        self._crew.close()
        if self._store:
            self._store.close()
        self._pool.close()


def num_readers(asked: int | None) -> int:
    """The threads that read for one rank: one for two cores, as a large box is read by several."""
    if asked is not None:
        return asked
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_READERS, max(1, (bound or 1) // 2))


def _shown(at: Position, schedule: Schedule) -> str:
    return f"epoch {at.epoch}, sample {at.sample} of {schedule}"


def _tracked(items: list[Any], title: str) -> Any:
    from rich.console import Console
    from rich.progress import track

    return track(items, title, console=Console(file=sys.stderr))
