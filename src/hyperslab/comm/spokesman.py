"""Who of the ranks tells the user of an error that stops them all."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch.distributed as dist

from hyperslab.comm.last_words import PATIENCE_SECONDS, find_words, leave_words
from hyperslab.errors import CommError, HyperslabError

LINGER_SECONDS = 2.0
"""How long rank 0, which keeps the store, stays for others to learn what it told."""


def have_met() -> bool:
    """Whether ranks can hear of each other."""
    return dist.is_available() and dist.is_initialized()


def speaks(
    rank: int,
    num_ranks: int,
    error: HyperslabError,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> bool:
    """Whether this rank, which stops with ``error``, should tell the user.

    Rank 0 does. Another does not if rank 0 stops too and tells of the same; nor if its error is
    only that others have failed, for then so is that of rank 0, or it is one of those.
    """
    words = f"{type(error).__name__}: {error}"
    leave_words(rank, words)
    if rank == 0:
        _errors_of(range(1, num_ranks), LINGER_SECONDS)
        return True
    said = _errors_of([0], patience_seconds).get(0, "")
    return not said or not (isinstance(error, CommError) or words in said)


def _errors_of(ranks: Iterable[int], patience_seconds: float) -> dict[int, str]:
    """The errors that ``ranks`` stopped with, as far as they come in time."""
    missing, said = set(ranks), dict[int, str]()
    until = time.monotonic() + patience_seconds
    while missing and time.monotonic() < until:
        try:
            found = {rank: find_words(rank) for rank in missing}
        except RuntimeError:  # the process that keeps the store is gone
            break
        said |= {rank: words.error for rank, words in found.items() if words and words.error}
        missing -= said.keys()
        time.sleep(0.05)
    return said
