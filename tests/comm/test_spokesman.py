import pytest
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.last_words import leave_words
from hyperslab.comm.spokesman import have_met, speaks
from hyperslab.errors import CommError, ConfigError


def told_by(errors):
    """Which of two ranks tell of their ``errors``; None is a rank that goes on."""
    rank, mine = dist.get_rank(), errors[dist.get_rank()]
    told = mine is not None and speaks(rank, mine, patience_seconds=0.3)
    both = [None, None]
    dist.all_gather_object(both, told)
    leave_words(rank)  # the next one finds nothing
    dist.barrier()
    return both


@pytest.mark.ranks(2)
def test_one_of_the_ranks_tells_of_what_stops_them():
    hs.init(device="cpu")
    assert have_met()
    alike, own = ConfigError("no such file"), ConfigError("short file")
    lost = CommError("rank 1 lost contact")
    about = CommError("rank 1 stopped, and so do all: ConfigError: short file")
    assert told_by([alike, alike]) == [True, False]
    assert told_by([about, own]) == [True, False]
    assert told_by([alike, own]) == [True, True]
    assert told_by([alike, lost]) == [True, False]


@pytest.mark.ranks(2)
def test_an_error_that_rank_0_does_not_have_is_told():
    hs.init(device="cpu")
    assert told_by([None, ConfigError("short file")]) == [False, True]
    assert told_by([None, CommError("rank 1 lost contact")]) == [False, True]
