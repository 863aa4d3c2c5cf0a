import os
import statistics
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """Has the modules of benchmarks/gpu found, here and in processes that are started."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu.")]:
        del sys.modules[name]


def test_a_function_that_kills_its_process_is_told_in_words(gpu):
    from gpu.apart import run_apart

    assert run_apart(os.abort, timeout_seconds=60) == "its process died with exit code -6"


def test_a_function_that_hangs_is_given_up(gpu):
    from gpu.apart import run_apart

    start = time.perf_counter()
    assert run_apart(time.sleep, 60, timeout_seconds=1) == "its process gave no result in 1 s"
    assert time.perf_counter() - start < 30


def test_a_function_gives_its_result_from_another_process(gpu):
    from gpu.apart import run_apart

    assert run_apart(os.getpid, timeout_seconds=60) != os.getpid()


def test_the_second_choice_is_measured_where_the_first_fails(gpu):
    from gpu.cases import cosmoflow
    from gpu.trial import measure

    case = cosmoflow(8, precision="fp32", width=1)
    choices = [{"depth_first": ["no.such.layer"]}, {}]
    measured = measure(case, torch.device("cpu"), choices, 0.0)
    assert measured.words == "channels_last"
    failure = measure(case, torch.device("cpu"), choices[:1], 0.0)
    assert failure.startswith("channels_last: ConfigError")


def test_sides_that_took_turns_are_compared_round_by_round(gpu):
    from gpu.cases import cosmoflow
    from gpu.trial import measure, measure_in_turns

    case, device = cosmoflow(8, precision="fp32", width=1), torch.device("cpu")
    plain, ours = (measure(case, device, [choice], 0.0) for choice in (None, {}))
    assert ours.times(plain) == ours.ms / plain.ms
    plain, ours = measure_in_turns(case, device, [plain, ours], 0.0)
    assert len(plain.rounds) == len(ours.rounds) > 0
    for host in (False, True):
        ratios = [b[host] / a[host] for a, b in zip(plain.rounds, ours.rounds, strict=True)]
        assert ours.times(plain, host=host) == statistics.median(ratios)


def test_what_cudnn_has_chosen_with_benchmark_is_kept_apart(gpu, monkeypatch):
    from gpu.trial import SETTINGS, run_with

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # so that it is put back
    seen = {}
    for setting in SETTINGS:
        found = run_with(setting, lambda: (threading.get_ident(), torch.backends.cudnn.benchmark))
        seen.setdefault(setting.benchmark, set()).add(found)
    (without,), (with_it,) = seen[False], seen[True]
    assert without == (threading.get_ident(), False)
    assert with_it[0] != without[0]
    assert with_it[1]
