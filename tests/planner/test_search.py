import time
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from hyperslab.layout import Window
from hyperslab.planner.cost import Job
from hyperslab.planner.machine import load_machine
from hyperslab.planner.network import Layer, Network, load_shipped
from hyperslab.planner.search import search

MACHINE = load_machine("dgx-h100")
JOB = Job(load_shipped("cosmoflow-512"), 2)


def fitting(memory_nbytes):
    found = search(JOB, replace(MACHINE, memory_nbytes=memory_nbytes), 8, recut=False)
    return found, {each.cut: each for each in found.candidates}


@settings(max_examples=20)
@given(st.floats(1e9, 40e9), st.floats(1, 2))
def test_more_memory_never_makes_less_fit(nbytes, factor):
    (small, few), (large, many) = fitting(nbytes), fitting(nbytes * factor)
    assert few.keys() <= many.keys()
    assert all(many[cut].step_seconds <= few[cut].step_seconds for cut in few)
    assert not few or large.best.step_seconds <= small.best.step_seconds
    assert len(few) + len(small.infeasible) == len(many) + len(large.infeasible)


def test_what_does_not_fit_says_by_how_much():
    small, none = fitting(0.2e9)
    assert not none
    nearest = small.infeasible[0]
    short = nearest.memory_nbytes - 0.92 * 0.2e9
    assert nearest.why_not == f"lacks {short / 2**30:.3g} GiB of memory"


def deep(num):
    """Blocks of two operators, which may be computed twice."""
    windows, shape = (Window(3, 1, 1, 1),) * 3, (64, 128, 128, 128)
    layers = []
    for n in range(num):
        before, block = len(layers) - 1, f"blocks.{n}"
        layers.append(Layer(block, "conv3d", "conv", (before,), shape, windows, keeps=(before,)))
        layers.append(Layer(block, "silu", "pointwise", (before + 1,), shape, keeps=(before + 1,)))
    return Network("deep", shape, tuple(layers), 1)


def test_as_few_modules_are_computed_twice_as_memory_asks_for():
    job, one = Job(deep(8), 1, "fp32"), 64 * 128**3 * 4
    counts = []
    for tensors in range(2, 22):
        room = replace(MACHINE, memory_nbytes=tensors * one / 0.92 + 1e3)
        found = search(job, room, 1)
        counts.append(len(found.best.recomputed) if found.candidates else None)
    assert counts[-1] == 0
    assert counts[0] is None
    known = [count for count in counts if count is not None]
    assert known == sorted(known, reverse=True)
    assert len({*known}) > 2


@pytest.mark.parametrize("memory_nbytes", [80e9, pytest.param(1e9, marks=pytest.mark.slow)])
def test_a_hundred_layers_on_512_ranks_take_seconds(memory_nbytes):
    machine = replace(MACHINE, memory_nbytes=memory_nbytes)
    started = time.process_time()
    found = search(Job(deep(50), 512), machine, 512)
    assert len(found.candidates) + len(found.infeasible) > 600  # five axes
    assert time.process_time() - started < 5
