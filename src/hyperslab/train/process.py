"""What a run and the process that started it know of each other: command, signals, exit code.

Nothing here loads torch until a run begins: the process that starts ranks needs none.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads torch
    from hyperslab.comm.mesh import Mesh

COMMAND = "HYPERSLAB_COMMAND"
"""The environment variable with the command, where the process has another one itself."""

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP")
"""What users, launchers and batch systems send before they kill (``sbatch --signal=USR1@60``)."""

CAN_GO_ON = 75
"""The exit code of a run that a signal stopped and that can go on (EX_TEMPFAIL)."""


def user_command() -> str:
    """The command as it can be typed again."""
    return os.environ.get(COMMAND) or shlex.join(sys.orig_argv)


class StopSignals:
    """Within it, a signal to stop is noted rather than obeyed; ``poll`` tells all ranks of it.

    A second SIGINT interrupts at once. Signals that were ignored before stay ignored (``nohup``).
    Outside the main thread, which alone may handle signals, only those of other ranks are heard.
    With ``until_exit`` a block that ends without an error leaves the signals ignored: one more of
    them, while the process ends, must not make a failure of what has ended well.

    Making one is collective over all ranks.
    """

    def __init__(self, mesh: Mesh, *, until_exit: bool = False) -> None:
        from hyperslab.comm.side_channel import SideChannel

        self.heard: str | None = None
        """The signal that ``poll`` has told of."""
        self._channel = SideChannel(mesh, "asking whether to stop")
        self._until_exit = until_exit
        self._is_single_rank = mesh.num_ranks == 1
        self._got = 0
        self._interrupted = False
        self._pending: Callable[[], int] | None = None
        self._before: dict[int, Any] = {}

    def poll(self) -> str | None:
        """The name of a signal that any rank got before the last ``poll``, or None.

        Called once a step by all ranks, all of which get the same answer. It asks for the next one
        and does not wait for it, so that no step is held up; a single rank hears at once.
        """
        answer = self._pending
        self._pending = self._channel.post_max(self._got)
        if self._is_single_rank:
            answer = self._pending
        if self.heard is None and answer is not None and (number := answer()):
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
            if self._pending is not None:
                self._pending()
            self._channel.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._got = self._got or number
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
