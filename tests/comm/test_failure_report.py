import pytest
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm import failure_report
from hyperslab.comm.failure_report import is_connected, is_reporter, publish_report
from hyperslab.errors import CommError, ConfigError


def test_a_rank_knows_of_itself_even_if_nobody_keeps_the_reports(monkeypatch):
    def gone():
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(failure_report, "_store", gone)
    told = failure_report.explain_failure(1, 4, 0.1)
    assert told.endswith("its own output says why, there is no report of 0, 2, 3")


def told_by(errors):
    """Which of two ranks tell of their ``errors``; None is a rank that goes on."""
    rank, mine = dist.get_rank(), errors[dist.get_rank()]
    told = mine is not None and is_reporter(rank, mine, timeout_seconds=0.3)
    both = [None, None]
    dist.all_gather_object(both, told)
    publish_report(rank)  # the next one finds nothing
    dist.barrier()
    return both


@pytest.mark.ranks(2)
def test_one_of_the_ranks_tells_of_what_stops_them():
    hs.init(device="cpu")
    assert is_connected()
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
