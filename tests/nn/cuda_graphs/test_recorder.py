"""What surrounds recordings, as far as no GPU is needed."""

import warnings
from contextlib import nullcontext

import pytest
import torch

from hyperslab.nn.cuda_graphs.recorder import CudaRecorder


@pytest.fixture
def calls(monkeypatch):
    """What a recorder without a GPU calls."""
    made = []
    for name in ("synchronize", "empty_cache", "set_sync_debug_mode", "get_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: made.append(name))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    return made


@pytest.fixture
def recorder():
    made = object.__new__(CudaRecorder)
    made._device, made._side = torch.device("cuda"), None
    return made


def test_work_that_failed_has_ended_before_anything_is_put_back(calls, recorder):
    work = recorder.practice()
    work.__enter__()
    calls.clear()
    assert not work.__exit__(ValueError, ValueError("failed"), None)
    assert calls == ["synchronize"]


def test_other_warnings_are_shown_as_ever_and_ignored_as_ever(calls, recorder):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "mine")
        warnings.filterwarnings("error", "bad")
        with recorder.watch_for_waits() as waits:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("mine", stacklevel=1)
            warnings.warn("dull", stacklevel=1)
            with pytest.raises(UserWarning, match="bad"):
                warnings.warn("bad", stacklevel=1)
    assert [str(each.message) for each in shown] == ["mine"]
    assert len(waits) == 1
    assert "test_recorder.py" in waits[0]
