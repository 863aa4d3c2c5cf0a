"""Batches that are made ahead of time, in order, by a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from hyperslab.errors import CommError

Plan = TypeVar("Plan")
Begun = TypeVar("Begun")
Item = TypeVar("Item")


class Pipeline(Generic[Plan, Begun, Item]):
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
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._is_draining = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="hyperslab-loader", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """The next item; raises what its making raised."""
        with self._change:
            self._num_allowed += 1
            self._change.notify_all()
            while not self._ready and self._error is None:
                self._change.wait()
            if not self._ready:
                raise self._told_error()
            return self._ready.popleft()

    def _told_error(self) -> BaseException:
        """What was raised, once; then words: who raises an error gives it what he refers to."""
        assert self._error is not None
        error, self._error = self._error, CommError(f"batches are no longer made: {self._error}")
        return error

    def drain(self, timeout_seconds: float | None = None) -> None:
        """Ends it when all that was allowed has been made, as it is on every other rank."""
        with self._change:
            self._is_draining = True
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
        self._ready.clear()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends it without waiting for what other ranks may never send."""
        with self._change:
            self._is_stopped = True
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
        with self._change:
            self._ready.append(item)
            self._change.notify_all()
