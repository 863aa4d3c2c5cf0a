"""Threads that read for a loader, and end with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Task = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class Crew:
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
