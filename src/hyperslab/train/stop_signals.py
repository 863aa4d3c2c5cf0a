"""Signals that ask a run to stop: all ranks hear of them, and stop after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel
from hyperslab.train.stopping import STOP_SIGNALS


class StopSignals:
    """Within it, a signal to stop is noted rather than obeyed; ``poll`` tells of it.

    A second SIGINT interrupts at once. Signals that were ignored before stay ignored (``nohup``).
    Outside the main thread, which alone may handle signals, only those of other ranks are heard.
    With ``until_exit`` a block that ends without an error leaves the signals ignored: one more of
    them, while the process ends, must not make a failure of what has ended well.

    Making one is collective over all ranks.
    """

    def __init__(self, mesh: Mesh, *, until_exit: bool = False) -> None:
        self.heard: str | None = None
        """The signal that ``poll`` has told of."""
        self._channel = SideChannel(mesh, "asking whether to stop")
        self._until_exit = until_exit
        self._alone = mesh.num_ranks == 1
        self._got = 0
        self._interrupted = False
        self._settle: Callable[[], int] | None = None
        self._before: dict[int, Any] = {}

    def poll(self) -> str | None:
        """The name of a signal that any rank got before the last ``poll``, or None.

        Called once a step by all ranks, all of which get the same answer. It asks for the next one
        and does not wait for it, so that no step is held up; one process alone hears at once.
        """
        settle = self._settle
        self._settle = self._channel.post_max(self._got)
        if self._alone:
            settle = self._settle
        if self.heard is None and settle is not None and (number := settle()):
            self.heard = signal.Signals(number).name
        return self.heard

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for name in STOP_SIGNALS:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        for number, handler in self._before.items():
            if self._until_exit and error is None:
                handler = signal.SIG_IGN
            # None is a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        if error is None:  # else the others may not have asked, and would be waited for
            if self._settle is not None:
                self._settle()
            self._channel.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._got = self._got or number
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
