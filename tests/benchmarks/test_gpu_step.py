import os
import sys
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
