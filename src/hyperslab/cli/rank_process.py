"""``python rank_process.py PARENT COMMAND...``: becomes COMMAND, which dies with process PARENT.

A program of its own, because between fork and exec of a process with threads no Python is safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has this process killed as soon as process ``parent`` is gone (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def become(parent: int, command: list[str]) -> None:
    # It may write to a terminal, although it is not in its foreground.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
