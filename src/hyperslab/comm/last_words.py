"""What ranks leave behind for the others when something goes wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Set
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from hyperslab.comm.journal import first_difference, journal

PATIENCE_SECONDS = 5.0
"""How long a rank waits at most for what the others have to say."""


class LastWords(NamedTuple):
    """What one rank has to say."""

    num_run: int
    """How many operators it has run."""
    latest: list[str]
    """The latest of them."""
    error: str
    """The error that it stopped with, if it stopped of itself."""


def leave_words(rank: int, error: str = "") -> None:
    """Leaves this rank's words where the others find it, if they can still be reached."""
    mine = LastWords(journal.count, [str(entry) for entry in journal.since(0)[-500:]], error)
    try:
        _store().set(_key(rank), json.dumps(mine))
    except RuntimeError:  # the process that keeps the store is gone
        return


def hear_others(rank: int, num_ranks: int, timeout_seconds: float) -> str:
    """What the words of all ranks, as far as they come in time, say of the cause."""
    leave_words(rank)
    heard: dict[int, LastWords] = {}
    until = time.monotonic() + min(PATIENCE_SECONDS, timeout_seconds)
    try:
        while len(heard) < num_ranks and time.monotonic() < until:
            for peer in range(num_ranks):
                if peer not in heard and (words := find_words(peer)):
                    heard[peer] = words
            if any(each.error for each in heard.values()):
                break
            time.sleep(0.02)
    except RuntimeError:  # the process that keeps the store is gone
        pass
    return _stopped(heard) or _differs(heard) or _silent({rank, *heard}, num_ranks, timeout_seconds)


def find_words(rank: int) -> LastWords | None:
    """What ``rank`` has left, if it has; raises ``RuntimeError`` if nobody keeps it any more."""
    if not _store().check([_key(rank)]):
        return None
    return LastWords(*json.loads(_store().get(_key(rank))))


def _stopped(heard: Mapping[int, LastWords]) -> str:
    for rank, each in heard.items():
        if each.error:
            last = f" in or after operator {each.num_run}, {each.latest[-1]}" if each.latest else ""
            return f"rank {rank} stopped{last}: {each.error}"
    return ""


def _differs(heard: Mapping[int, LastWords]) -> str:
    """The first operator that is another one on another rank; some may have come further."""
    if not heard:
        return ""
    runs = {rank: (each.num_run - len(each.latest), each.latest) for rank, each in heard.items()}
    difference = first_difference(runs, shared=min(each.num_run for each in heard.values()))
    return f"ranks ran different operators: {difference}" if difference else ""


def _silent(heard: Set[int], num_ranks: int, timeout_seconds: float) -> str:
    silent = [str(rank) for rank in range(num_ranks) if rank not in heard]
    said = f", there is no word of {', '.join(silent)}" if silent else ""
    return (
        f"another rank died, raised an error or did not answer within {timeout_seconds:g} s; its "
        f"own output says why{said}"
    )


def _store() -> Store:
    return PrefixStore("hyperslab", _get_default_store())


def _key(rank: int) -> str:
    return f"last words of rank {rank}"
