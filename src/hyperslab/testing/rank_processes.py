"""The processes of a team, as the caller sees them: from their fork to the first failure."""

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from hyperslab.cli.local_ranks import LOOPBACK, reserve_port, torchrun_variables, without_agent
from hyperslab.testing.messages import (
    Call,
    Died,
    Exited,
    Outcome,
    Raised,
    Returned,
    Seat,
    Signal,
    refer_to,
)
from hyperslab.testing.server import leave

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hyperslab.testing.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
SERVER_STOP_SECONDS = 5.0
"""After its caller has hung up: how long the server may take to end."""

WARM = ("hyperslab", "hypothesis", "numpy", "pytest", "torch._dynamo", "torch.distributed")
"""Packages that are loaded before the fork if the caller uses them (any optimizer does use
torch._dynamo). Importing them starts no thread and leaves CUDA alone, which cannot be said of all
of torch, nor of a test file."""

ECHO_SECONDS = 1.0
"""How long after a failure an earlier one, or the death that caused it, may still be reported."""

STACK_SECONDS = 20.0
STOP_SECONDS = 60.0
LEAVE = Call(refer_to(leave), pickle.dumps(((), {})), filters=())

TAIL = 2000
"""Letters of what a rank has printed that are told."""


class RankError(AssertionError):
    """A rank that raised, died or did not return, with what is known about it."""

    __module__ = "hyperslab.testing"  # where users import it from, and shorter in a report


class ServerError(RuntimeError):
    """The server did not start, or is gone and its ranks with it."""


class Client:
    """Starts a server and speaks to it; made by ``connect``, one per process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.exit_codes: dict[int, int] = {}
        """By the number of the seat, once its process is gone."""
        self._numbers = itertools.count()
        self.connection, self._process = start_server()
        atexit.register(self.close)
        try:
            self.connection.recv()
        except EOFError:
            self.close()
            raise ServerError("the server that ranks are forked from did not start") from None

    @property
    def usable(self) -> bool:
        """False in a fork of the process that made it, and when the server is gone."""
        return self.pid == os.getpid() and self._process.poll() is None

    def next_number(self) -> int:
        return next(self._numbers)

    def fork(self, seat: Seat, handle: int) -> None:
        """Fork a rank that answers calls over a copy of the socket ``handle``."""
        self.connection.send(seat)
        send_handle(self.connection, handle, self._process.pid)

    def signal(self, numbers: list[int], signum: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(Signal(numbers, signum))

    def listen(self) -> None:
        """Note the exits that the server has told of; do not wait for any."""
        while self.connection.poll():
            try:
                exited: Exited = self.connection.recv()
            except (EOFError, ConnectionError):
                raise ServerError("the server that ranks are forked from was killed") from None
            self.exit_codes[exited.number] = exited.exit_code

    def await_exits(self, numbers: Collection[int], timeout_seconds: float) -> None:
        """Wait until the processes of these seats are gone, and forget them."""
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(ServerError):
            while not self.exit_codes.keys() >= set(numbers) and time.monotonic() < deadline:
                if self.connection.poll(deadline - time.monotonic()):
                    self.listen()
        for number in numbers:
            self.exit_codes.pop(number, None)

    def close(self) -> None:
        self.connection.close()
        if self.pid != os.getpid():
            return
        try:
            self._process.wait(SERVER_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_server() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A new interpreter rather than a fork: the caller may have threads, or CUDA in use."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                BOOT,
                json.dumps(sys.path),
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return ours, process


_client: Client | None = None


def connect() -> Client:
    """This process's server, started if need be: seconds the first time, nothing later."""
    global _client
    if _client is None or not _client.usable:
        _client = Client()
    return _client


@dataclass(frozen=True, slots=True)
class Member:
    """One rank, as the caller sees it."""

    seat: Seat
    connection: Connection

    def outcome(self, exit_codes: Mapping[int, int]) -> Outcome | None:
        """What has become of the call, if that is known. What a rank said outlives it."""
        try:
            if not self.connection.closed and self.connection.poll():
                outcome: Outcome = self.connection.recv()
                return outcome
        except (EOFError, ConnectionError):
            self.connection.close()
        exit_code = exit_codes.get(self.seat.number)
        return None if exit_code is None else Died(exit_code)


class RankProcesses:
    """One process per rank, alive from here on."""

    def __init__(self, num_ranks: int) -> None:
        self.complete = True
        """False once a rank has died."""
        self._client = connect()
        self._folder = tempfile.TemporaryDirectory(prefix="hyperslab-ranks-")
        self._port = reserve_port()
        self._members = [self._fork(rank, num_ranks) for rank in range(num_ranks)]

    def _fork(self, rank: int, num_ranks: int) -> Member:
        told = torchrun_variables(rank, num_ranks, self._port.getsockname()[1])
        seat = Seat(
            number=self._client.next_number(),
            rank=rank,
            folder=Path(self._folder.name),
            environment=without_agent(os.environ) | told | LOOPBACK | {"OMP_NUM_THREADS": "1"},
            working_folder=Path.cwd(),
            search_path=sys.path,
            warm=warm_modules() if rank == 0 else [],
        )
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._client.fork(seat, theirs.fileno())
        return Member(seat, ours)

    def run(self, call: Call, may_die: Collection[int], timeout_seconds: float) -> list[Any]:
        """The results by rank; None for a rank of ``may_die`` that died.

        After an error the ranks are in no known state: ``kill`` the processes.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_seconds
        for member in self._members:
            with contextlib.suppress(ConnectionError):  # it is dead, which the server will tell
                member.connection.send(call)
        outcomes: dict[int, Outcome] = {}
        while self._gather(outcomes, deadline):
            if failures(outcomes, may_die):
                deadline = time.monotonic() + ECHO_SECONDS
                while self._gather(outcomes, deadline):
                    pass
                raise RankError(self._say_failed(failures(outcomes, may_die)))
        if len(outcomes) < len(self._members):
            raise RankError(self._say_stuck(outcomes, timeout_seconds))
        self.complete = not any(isinstance(outcome, Died) for outcome in outcomes.values())
        return [result(outcomes[rank]) for rank in range(len(self._members))]

    def leave(self) -> None:
        """Let every rank tidy up, as a last call."""
        self.run(LEAVE, may_die=(), timeout_seconds=STOP_SECONDS)

    def kill(self) -> None:
        """Kill what still runs, and leave nothing behind."""
        numbers = [member.seat.number for member in self._members]
        self._client.signal(numbers, signal.SIGKILL)
        self._client.await_exits(numbers, STOP_SECONDS)
        for member in self._members:
            member.connection.close()
        self._port.close()
        self._folder.cleanup()

    def _gather(self, outcomes: dict[int, Outcome], deadline: float) -> bool:
        """Wait for news and add them to ``outcomes``; False if all are known, or it is too late."""
        waiting = [member for member in self._members if member.seat.rank not in outcomes]
        connections = [each.connection for each in waiting if not each.connection.closed]
        seconds_left = max(0.0, deadline - time.monotonic())
        if not waiting or not wait([self._client.connection, *connections], seconds_left):
            return False
        self._client.listen()
        for member in waiting:
            if (outcome := member.outcome(self._client.exit_codes)) is not None:
                outcomes[member.seat.rank] = outcome
        return True

    def _say_failed(self, failed: Mapping[int, Raised | Died]) -> str:
        rank, outcome = first_failure(failed)
        if isinstance(outcome, Raised):
            told = f"of {len(self._members)} raised {outcome.summary}\n\n{outcome.traceback}"
        elif outcome.exit_code >= 0:
            told = f"died with exit code {outcome.exit_code}"
        else:
            number = -outcome.exit_code
            told = f"died with signal {number} ({signal.Signals(number).name})"
        return f"rank {rank} {told}{self._say_printed()}"

    def _say_stuck(self, outcomes: Mapping[int, Outcome], timeout_seconds: float) -> str:
        """The stacks of the ranks that still run."""
        stuck = [member.seat for member in self._members if member.seat.rank not in outcomes]
        self._client.signal([seat.number for seat in stuck], signal.SIGUSR1)
        await_files([seat.stacks for seat in stuck], STACK_SECONDS)
        ranks = ", ".join(str(seat.rank) for seat in stuck)
        of = f"of {len(self._members)} still running after {timeout_seconds:g} s"
        lines = [f"rank {ranks} {of}"]
        lines += [f"\nrank {seat.rank} was here:\n{read(seat.stacks).rstrip()}" for seat in stuck]
        return "\n".join(lines) + self._say_printed()

    def _say_printed(self) -> str:
        """The end of what each rank wrote to stdout and stderr, if it was anything."""
        printed = {each.seat.rank: read(each.seat.output) for each in self._members}
        return "".join(
            f"\n--- rank {rank} printed ---\n{text[-TAIL:].rstrip()}\n"
            for rank, text in printed.items()
            if text.strip()
        )


def failures(outcomes: Mapping[int, Outcome], may_die: Collection[int]) -> dict[int, Raised | Died]:
    return {
        rank: outcome
        for rank, outcome in outcomes.items()
        if isinstance(outcome, Raised) or (isinstance(outcome, Died) and rank not in may_die)
    }


def first_failure(failed: Mapping[int, Raised | Died]) -> tuple[int, Raised | Died]:
    """A death comes first: the others may have raised because of it. Then the earliest."""

    def order(rank: int) -> tuple[bool, float]:
        outcome = failed[rank]
        return isinstance(outcome, Raised), outcome.when if isinstance(outcome, Raised) else 0.0

    rank = min(failed, key=order)
    return rank, failed[rank]


def result(outcome: Outcome) -> Any:
    return pickle.loads(outcome.result) if isinstance(outcome, Returned) else None


def warm_modules() -> list[str]:
    """The modules of ``WARM`` that this process has loaded."""
    return [name for name in list(sys.modules) if any(f"{name}.".startswith(f"{w}.") for w in WARM)]


def await_files(paths: Collection[Path], timeout_seconds: float) -> None:
    """Wait until each of ``paths`` holds something and none of them grows."""
    deadline = time.monotonic() + timeout_seconds
    before: list[int] = []
    while time.monotonic() < deadline:
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(0.05)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
