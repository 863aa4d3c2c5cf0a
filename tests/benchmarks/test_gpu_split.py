"""What ``benchmarks/gpu_split.py`` makes of its figures."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEP = {"section": "cosmoflow-512", "network": "CosmoFlow", "ranks": 2, "ms": 9.0}
STEP |= {"host_ms": 2.0, "first_host_ms": 2.5}
REFUSED = {"section": "cosmoflow-512", "ranks": 2, "graphs": True, "failure": "rank 0: refused"}


@pytest.fixture
def gpu_split(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_split as module

    yield module
    for name in [n for n in sys.modules if n.partition(".")[0] in ("gpu", "gpu_split", "bars")]:
        del sys.modules[name]


def told(gpu_split, **report):
    found = gpu_split.verdicts({"steps": [], **report})
    return {each.bar.what: (each.bar.measured, each.word, each.why) for each in found}


def step(graphs, times, off=0.01, rounding=0.02, **more):
    figures = {"graphs": graphs, "times": times, "off": off, "rounding": rounding}
    return STEP | figures | more


def test_the_faster_of_steps_with_graphs_and_without_is_held_against_the_bar(gpu_split):
    rows = told(gpu_split, steps=[step(True, 1.2, host_ms=1.0), step(False, 1.4, host_ms=20.0)])
    assert rows["CosmoFlow 4x512^3, 2 ranks against 1"] == (1.2, "met", "")
    assert rows["host of any split step, ms"] == (1.0, "met, stretch too", "")
    assert rows["host of any split step after a pause, ms"] == (2.5, "met", "")


def test_of_steps_that_are_about_as_fast_that_with_graphs_counts(gpu_split):
    rows = told(gpu_split, steps=[step(True, 1.22), step(False, 1.2, host_ms=20.0)])
    assert rows["CosmoFlow 4x512^3, 2 ranks against 1"] == (1.22, "met", "")
    assert rows["host of any split step, ms"] == (2.0, "met", "")


def test_steps_that_graphs_refuse_are_held_against_it_without_them(gpu_split):
    rows = told(gpu_split, steps=[REFUSED, step(False, 1.4)])
    expected = (1.4, "[red]MISSED[/red]", "without CUDA graphs")
    assert rows["CosmoFlow 4x512^3, 2 ranks against 1"] == expected


def test_a_row_that_failed_says_why(gpu_split):
    rows = told(
        gpu_split,
        steps=[REFUSED],
        kernels=[{"ranks": 2, "failure": "no room"}],
        exchange={"failure": "lost contact"},
    )
    words = {word for _, word, _ in rows.values()}
    assert words == {"[red]NOT MEASURED[/red]"}
    assert rows["CosmoFlow 4x512^3, 2 ranks against 1"][2] == "rank 0: refused"
    assert rows["kernels of one of 2 ranks, efficiency"][2] == "no room"
    assert rows["exchange of 1 MiB in a graph, us"][2] == "lost contact"


def test_a_fast_step_with_wrong_gradients_shows(gpu_split):
    rows = told(gpu_split, steps=[step(True, 1.0, off=0.5), step(False, 1.4)])
    what = "gradients of any split step off one rank's, of rounding"
    assert rows[what][:2] == (25.0, "[red]MISSED[/red]")
