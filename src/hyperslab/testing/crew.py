"""The processes of a team, from their fork to the first failure."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hyperslab.cli.local_ranks import LOOPBACK, reserve_port, torchrun_variables, without_agent
from hyperslab.testing.client import connect
from hyperslab.testing.environment import warm_modules
from hyperslab.testing.failure import RankError, say_died, say_printed, say_raised, say_stuck
from hyperslab.testing.function_ref import refer_to
from hyperslab.testing.messages import Call, Died, Outcome, Raised, Returned, Seat
from hyperslab.testing.rank import leave

ECHO_SECONDS = 1.0
"""How long after a failure an earlier one, or the death that caused it, may still be reported."""

STACK_SECONDS = 20.0
STOP_SECONDS = 60.0
LEAVE = Call(refer_to(leave), pickle.dumps(((), {})), filters=())


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


class Crew:
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

        After an error the ranks are in no known state: ``disband`` the crew.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_seconds
        for member in self._members:
            with contextlib.suppress(ConnectionError):  # it is dead, which the server will tell
                member.connection.send(call)
        outcomes: dict[int, Outcome] = {}
        while self._gather(outcomes, deadline):
            if failures(outcomes, may_die):
                self._gather_all(outcomes, time.monotonic() + ECHO_SECONDS)
                raise RankError(self._say_failed(failures(outcomes, may_die)))
        if len(outcomes) < len(self._members):
            raise RankError(self._say_stuck(outcomes, timeout_seconds))
        self.complete = not any(isinstance(outcome, Died) for outcome in outcomes.values())
        return [result(outcomes[rank]) for rank in range(len(self._members))]

    def leave(self) -> None:
        """Let every rank tidy up, as a last call."""
        self.run(LEAVE, may_die=(), timeout_seconds=STOP_SECONDS)

    def disband(self) -> None:
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

    def _gather_all(self, outcomes: dict[int, Outcome], deadline: float) -> None:
        while self._gather(outcomes, deadline):
            pass

    def _say_failed(self, failed: Mapping[int, Raised | Died]) -> str:
        rank, outcome = first_failure(failed)
        if isinstance(outcome, Died):
            return say_died(rank, outcome) + self._say_printed()
        return say_raised(rank, len(self._members), outcome) + self._say_printed()

    def _say_stuck(self, outcomes: Mapping[int, Outcome], timeout_seconds: float) -> str:
        stuck = [member.seat for member in self._members if member.seat.rank not in outcomes]
        self._client.signal([seat.number for seat in stuck], signal.SIGUSR1)
        await_files([seat.stacks for seat in stuck], STACK_SECONDS)
        stacks = {seat.rank: read(seat.stacks) for seat in stuck}
        return say_stuck(stacks, len(self._members), timeout_seconds) + self._say_printed()

    def _say_printed(self) -> str:
        return say_printed({each.seat.rank: read(each.seat.output) for each in self._members})


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
