"""Who of the ranks tells the user of an error that stops them all."""

from __future__ import annotations

import time

import torch.distributed as dist

from hyperslab.comm.last_words import PATIENCE_SECONDS, find_words, leave_words
from hyperslab.errors import CommError, HyperslabError


def have_met() -> bool:
    """Whether ranks can hear of each other."""
    return dist.is_available() and dist.is_initialized()


def speaks(rank: int, error: HyperslabError, *, patience_seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether this rank, which stops with ``error``, should tell the user.

    Rank 0 does. Another does not if rank 0 stops too and tells of the same; nor if its error is
    only that others have failed, for then so is that of rank 0, or it is one of those.
    """
    words = f"{type(error).__name__}: {error}"
    leave_words(rank, words)
    if rank == 0:
        return True
    said = _error_of_rank_0(patience_seconds)
    return not said or not (isinstance(error, CommError) or words in said)


def _error_of_rank_0(patience_seconds: float) -> str:
    """What rank 0 stopped with, or nothing if it does not within that time."""
    until = time.monotonic() + patience_seconds
    while time.monotonic() < until:
        try:
            words = find_words(0)
        except RuntimeError:  # the process that keeps the store is gone
            break
        if words and words.error:
            return words.error
        time.sleep(0.05)
    return ""
