"""Ranks as processes of this machine: started, watched, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from hyperslab.cli import rank_process
from hyperslab.cli.machine import find_machine
from hyperslab.cli.port import reserve_port
from hyperslab.train.process import CAN_GO_ON, STOP_SIGNALS

PASSED_ON = tuple(getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name))
"""What the ranks get when this process does."""

GRACE_SECONDS = 20.0
"""After one rank has failed: how long the others may take to notice, say why, and end."""

KILL_SECONDS = 5.0
"""After they were asked to end: how long they may take."""

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Ending:
    """How a rank ended; a negative ``code`` is the signal that killed it."""

    rank: int
    code: int
    was_asked: bool = False
    """Whether it was made to end here, because another had failed."""

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, CAN_GO_ON)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended with exit code {self.code}"
        return f"rank {self.rank} was killed by {signal_name(-self.code)}"


class Outcome(NamedTuple):
    """How all ranks ended."""

    endings: list[Ending]
    """The first first."""

    passed_on: list[str]
    """The signals that they were sent, because this process was."""

    def signal_behind(self, ending: Ending) -> str | None:
        """The signal that was passed on and ended the rank, if it was that."""
        by = {-signal.Signals[name]: name for name in self.passed_on}
        if "SIGINT" in self.passed_on:  # as Python tells of it
            by[128 + signal.SIGINT] = "SIGINT"
        if _leaves_no_choice(self.passed_on):
            by[-signal.SIGKILL] = self.passed_on[-1]
        return by.get(ending.code)


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    environ: Mapping[str, str] = os.environ,
    grace_seconds: float = GRACE_SECONDS,
    until_exit: bool = False,
) -> Outcome:
    """Runs ``command`` as ``num_ranks`` processes, and tells how they ended.

    Each finds its rank in its environment, as under torchrun. Signals to this process are passed on
    to all of them, once: they are in process groups of their own, so that what a terminal sends
    reaches them through here alone. When one fails, the others have ``grace_seconds`` to end too.
    They do not outlive this process, even if it is killed. With ``until_exit``, for a process that
    is about to end, signals that come after them are ignored.
    """
    team = _Team(grace_seconds)
    with _caught(until_exit=until_exit) as signals, reserve_port() as reserved:
        port = reserved.getsockname()[1]
        try:
            for rank in range(num_ranks):
                team.start(command, rank_environ(environ, rank, num_ranks, port))
            while team.running:
                team.watch(signals)
                time.sleep(POLL_SECONDS)
        finally:
            team.kill()
    return Outcome(team.endings, team.passed_on)


def rank_environ(
    environ: Mapping[str, str], rank: int, num_ranks: int, port: int
) -> dict[str, str]:
    """The environment of one rank, as torchrun would set it, and with its share of the cores."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    threads = max(1, int(find_machine()["cpu_cores"]) // num_ranks)
    defaults = {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(threads),
    }
    # torchrun's own would make ranks look for its agent.
    kept = {name: each for name, each in environ.items() if not name.startswith("TORCHELASTIC_")}
    return {**defaults, **kept} | {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass
class _Team:
    grace_seconds: float
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    deadline: float | None = None
    """When those still running are asked to end, then killed."""
    was_asked: bool = False
    passed_on: list[str] = field(default_factory=list)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.running[int(environ["RANK"])] = subprocess.Popen(
            [sys.executable, "-IS", rank_process.__file__, str(os.getpid()), *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def watch(self, signals: list[int]) -> None:
        """Passes ``signals`` on, notes who has ended, and ends the others when their time is up."""
        while signals:
            self._pass_on(signals.pop(0))
        for rank, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[rank]
                self._note(Ending(rank, code, self.was_asked))
        if self.deadline is not None and time.monotonic() > self.deadline:
            self._send(signal.SIGKILL if self.was_asked else signal.SIGTERM)
            self.was_asked, self.deadline = True, time.monotonic() + KILL_SECONDS

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def _note(self, ending: Ending) -> None:
        self.endings.append(ending)
        if ending.is_failure and self.deadline is None:
            self.deadline = time.monotonic() + self.grace_seconds

    def _pass_on(self, number: int) -> None:
        """The first asks ranks to stop well, the second to stop now; a third leaves no choice."""
        self.passed_on.append(signal_name(number))
        self._send(signal.SIGKILL if _leaves_no_choice(self.passed_on) else number)

    def _send(self, number: int) -> None:
        for process in self.running.values():
            process.send_signal(number)


@contextmanager
def _caught(*, until_exit: bool) -> Iterator[list[int]]:
    """The signals that came and are to be passed on; those that were ignored still are."""
    signals: list[int] = []
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: signals.append(number))
    after = before
    try:
        yield signals
        if until_exit:
            after = dict.fromkeys(before, signal.SIG_IGN)
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)


def _leaves_no_choice(passed_on: Sequence[str]) -> bool:
    return sum(name in ("SIGINT", "SIGTERM") for name in passed_on) > 2


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
