"""Batches ahead of time, in order: the pipeline of a loader, which ends with it."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from hyperslab.errors import CommError, ConfigError
from hyperslab.io.engine.buffers import BufferPool
from hyperslab.io.schedule import Batch, Position, Schedule
from hyperslab.store.batches import BatchReader, LocalBatch, PendingBatch, ReaderThreads
from hyperslab.store.memory import MemoryStore
from hyperslab.store.peers import Peers, settle_failure
from hyperslab.trace import Category, active
from hyperslab.trace.clocks import ClockComparison, clock_name
from hyperslab.trace.recorder import Place

Plan = TypeVar("Plan")
Begun = TypeVar("Begun")
Item = TypeVar("Item")


class Prefetcher(Generic[Plan, Begun, Item]):
    """Makes an item of each plan: ``begin`` starts the work and returns at once, ``finish`` waits.

    Beside the item that is asked for, at most ``depth`` are begun and not taken yet. To ask lets
    the next one begin: if taking did, the thread would finish another item before it heard of it.
    Both calls are made by one thread, in the order of the plans, so that they may talk to other
    ranks; all ranks begin the same plans, as far as they ask for the same items.
    """

    def __init__(
        self,
        plans: Iterator[Plan],
        begin: Callable[[Plan], Begun],
        finish: Callable[[Begun], Item],
        depth: int,
    ) -> None:
        self._plans, self._begin, self._finish = plans, begin, finish
        self._change = threading.Condition()
        self._num_allowed, self._num_begun = depth, 0
        self._ready: deque[tuple[Item, int]] = deque()
        """Each with the time since when, in a trace."""
        self._error: BaseException | None = None
        self._is_draining = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="hyperslab-loader", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """The next item; raises what its making raised."""
        with self._change:
            self._num_allowed += 1
            self._change.notify_all()
            was_ready = bool(self._ready)
            while not self._ready and self._error is None:
                self._change.wait()
            if not self._ready:
                raise self._told_error()
            item, since = self._ready.popleft()
        if was_ready and since and (recorder := active.recorder) is not None:
            stop = recorder.now()
            recorder.add_to("ready batches", Category.delay, "batch", since, stop, apart=True)
        return item

    def _told_error(self) -> BaseException:
        """What was raised, once; then words: who raises an error gives it what he refers to."""
        assert self._error is not None
        error, self._error = self._error, CommError(f"batches are no longer made: {self._error}")
        return error

    def drain(self, timeout_seconds: float | None = None) -> None:
        """Ends it when all that was allowed has been made, as it is on every other rank."""
        self._is_draining = True
        self._end(timeout_seconds)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends it without waiting for what other ranks may never send."""
        self._is_stopped = True
        self._end(timeout_seconds)

    def _end(self, timeout_seconds: float | None) -> None:
        with self._change:
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
        self._ready.clear()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            begun: deque[Begun] = deque()
            for plan in self._plans:
                if not self._may_begin(begun):
                    break
                begun.append(self._begin(plan))
            while begun and not self._is_stopped:
                self._deliver(begun)
        except BaseException as error:  # noqa: BLE001 - for whoever takes the next item
            with self._change:
                self._error = error
                self._change.notify_all()

    def _may_begin(self, begun: deque[Begun]) -> bool:
        """Whether another plan is to be begun; finishes older ones while it is not time yet."""
        while True:
            with self._change:
                if self._is_stopped:
                    return False
                if self._num_begun < self._num_allowed:
                    self._num_begun += 1
                    return True
                if not begun:
                    if self._is_draining:
                        return False
                    self._change.wait()
                    continue
            self._deliver(begun)

    def _deliver(self, begun: deque[Begun]) -> None:
        item = self._finish(begun.popleft())
        recorder = active.recorder
        with self._change:
            self._ready.append((item, 0 if recorder is None else recorder.now()))
            self._change.notify_all()


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


class Pipeline:
    """What works for a loader: threads, buffers, the store, and the prefetcher that is running."""

    def __init__(
        self,
        reader: BatchReader,
        peers: Peers,
        readers: ReaderThreads,
        pool: BufferPool,
        store: MemoryStore | None,
        prefetch: int,
    ) -> None:
        self._reader, self._peers, self._readers, self._pool = reader, peers, readers, pool
        self._store, self._prefetch = store, prefetch
        self._pid = os.getpid()
        self._prefetcher: Prefetcher[Batch, PendingBatch, Delivered] | None = None
        self._goes_on_at: tuple[Position, Schedule, Deliver] | None = None

    def start(self, at: Position, schedule: Schedule, deliver: Deliver) -> None:
        """Lets batches from ``at`` on be made, unless they already are.

        Collective over all ranks.
        """
        if self._goes_on_at == (at, schedule, deliver):
            return
        self.end_prefetching()
        clocks = ClockComparison(self._check_alike(at, schedule), self._peers)
        reader = self._reader

        def begin(batch: Batch) -> PendingBatch:
            return reader.begin(batch, schedule.number_of(batch.at), deliver.turns)

        def finish(pending: PendingBatch) -> Delivered:
            at = pending.batch.at
            clocks.now_and_then()
            with active.placed(Place(at.epoch, schedule.number_of(at))):
                local = reader.finish(pending)
                return local, deliver(local)

        batches = schedule.batches(at)
        self._prefetcher = Prefetcher(batches, begin, finish, self._prefetch)
        self._goes_on_at = (at, schedule, deliver)

    def take(self) -> Delivered:
        """The next batch, as it was delivered."""
        assert self._prefetcher is not None
        assert self._goes_on_at is not None
        if os.getpid() != self._pid:
            raise ConfigError(
                f"the loader belongs to process {self._pid}, and its threads did not come along "
                f"into process {os.getpid()}: make another loader here"
            )
        local, delivered = self._prefetcher.take()
        self._goes_on_at = (local.batch.next, *self._goes_on_at[1:])
        return local, delivered

    def _check_alike(self, at: Position, schedule: Schedule) -> list[str | None]:
        """The clocks by which ranks record."""
        told = self._peers.tell_all(((at, schedule), clock_name()))
        everywhere = [theirs for theirs, _ in told]
        for rank, theirs in enumerate(everywhere):
            if theirs != everywhere[0]:
                raise CommError(
                    f"rank 0 goes on at {_shown(*everywhere[0])}, rank {rank} at {_shown(*theirs)}:"
                    " give the loaders of all ranks the same arguments and the same saved state, "
                    "and leave a loop over one at the same step"
                )
        return [clock for _, clock in told]

    def preload(self, show: bool) -> None:
        """Fills all slots of this rank's store. Collective over all ranks."""
        assert self._store is not None
        store, readers = self._store, self._readers
        indices = store.fill_all()
        fills = [readers.submit(store.fill, index) for index in indices]
        shown = _tracked(fills, "Loading samples into memory") if show else fills
        errors = [fill.exception() for fill in shown]
        cause = next(filter(None, errors), None)
        settle_failure(self._peers, {}, store.failure(indices), cause)

    def end_prefetching(self, timeout_seconds: float | None = None) -> bool:
        """Ends it where the other ranks do, so that none is left in the midst of a message.

        After ``timeout_seconds`` it is taken that the others never will, and it has not ended.
        """
        prefetcher, self._prefetcher, self._goes_on_at = self._prefetcher, None, None
        if prefetcher is None:
            return True
        if self._peers.grid.num_ranks > 1:
            prefetcher.drain(timeout_seconds)
        prefetcher.stop()
        return prefetcher.has_ended

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        if self.end_prefetching(PATIENCE_SECONDS):
            self._peers.close()
        if self._store:
            self._store.stop_waiting()
        self._readers.close()
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
