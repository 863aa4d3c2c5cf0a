"""How far a long piece of work is."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Is called with the bytes done so far, and with those there are to do."""


class Stopped(Exception):  # noqa: N818 - no error: someone else has one, or pressed Ctrl-C
    """Raised in the threads of a piece of work that was given up."""


class Meter:
    """Counts what threads have done, and stops them."""

    def __init__(self, total: int, progress: Progress | None = None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = False

    def add(self, nbytes: int) -> None:
        """Tells of ``nbytes`` more; raises ``Stopped`` if there is no use in going on."""
        if self._stopped:
            raise Stopped
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)

    def stop(self) -> None:
        self._stopped = True
