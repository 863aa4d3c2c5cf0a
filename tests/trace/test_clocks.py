"""Clocks of hosts, compared while a loader works."""

import time

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.comm.agree import run_on_all
from hyperslab.trace import Category, active, load_trace
from hyperslab.trace.recorder import Clock

MILLISECOND = 1_000_000


@pytest.mark.ranks(2)
def test_clocks_that_differ_by_two_seconds_agree_to_a_millisecond(tmp_path):
    """Rank 1 plays another host, whose clocks are 2 s ahead and 1 s behind in Unix time."""
    mesh = hs.init(sample=2, device="cpu")
    ahead = 2_000_000_000 * mesh.rank
    clock = Clock(
        now=lambda: time.perf_counter_ns() + ahead,
        unix=lambda: time.time_ns() - ahead // 2,
        name=f"clock {mesh.rank}",
        host=f"host {mesh.rank}",
    )
    if mesh.rank == 0:
        np.save(tmp_path / "x.npy", np.zeros((4, 8), np.int16))
    run_on_all(lambda: None, mesh)
    active.start(tmp_path / "trace", rank=mesh.rank, clock=clock)
    with hs.Loader(hs.open(tmp_path / "x.npy", axes="NC"), mesh, batch_size=2) as loader:
        for _ in loader.numpy():
            true = time.perf_counter_ns()
            active.recorder.add(Category.user, "now", true + ahead, true + ahead, nbytes=true)
    active.stop()
    run_on_all(lambda: None, mesh)
    trace = load_trace(tmp_path)
    assert trace.notes == []
    assert [process.host for process in trace.processes] == ["host 0", "host 1"]
    told = trace.of(Category.user)
    errors = told["start"] - told["nbytes"]
    assert set(told["process"].tolist()) == {0, 1}
    assert np.ptp(errors) < MILLISECOND
