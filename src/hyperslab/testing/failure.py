"""What is told of a run that failed."""

import signal
from collections.abc import Mapping

from hyperslab.testing.messages import Died, Raised

TAIL = 2000


class RankError(AssertionError):
    """A rank that raised, died or did not return, with what is known about it."""

    __module__ = "hyperslab.testing"  # where users import it from, and shorter in a report


def say_raised(rank: int, num_ranks: int, raised: Raised) -> str:
    return f"rank {rank} of {num_ranks} raised {raised.summary}\n\n{raised.traceback}"


def say_died(rank: int, died: Died) -> str:
    if died.exit_code >= 0:
        return f"rank {rank} died with exit code {died.exit_code}"
    number = -died.exit_code
    return f"rank {rank} died with signal {number} ({signal.Signals(number).name})"


def say_stuck(stacks: Mapping[int, str], num_ranks: int, timeout_seconds: float) -> str:
    """``stacks`` are those of the ranks that still run."""
    ranks = ", ".join(str(rank) for rank in stacks)
    lines = [f"rank {ranks} of {num_ranks} still running after {timeout_seconds:g} s"]
    lines += [f"\nrank {rank} was here:\n{stack.rstrip()}" for rank, stack in stacks.items()]
    return "\n".join(lines)


def say_printed(printed: Mapping[int, str]) -> str:
    """The end of what each rank wrote to stdout and stderr; nothing of those that were silent."""
    return "".join(
        f"\n--- rank {rank} printed ---\n{text[-TAIL:].rstrip()}\n"
        for rank, text in printed.items()
        if text.strip()
    )
