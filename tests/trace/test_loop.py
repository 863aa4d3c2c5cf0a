"""Steps, waits and epochs: of our loaders by themselves, of others by ``hs.trace.steps``."""

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.trace import Category, Flag, active, load_trace

NUM = 10
"""Samples, in batches of 4."""


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    active.stop()


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(NUM * 4, dtype=np.int16).reshape(NUM, 4))
    return hs.open(tmp_path / "x.npy", axes="NC")


def places(trace, category):
    return [(int(span["epoch"]), int(span["step"])) for span in trace.of(category)]


def stops(spans):
    return spans["start"] + spans["duration"]


def check_epochs(trace, num_epochs, num_steps):
    """Steps follow each other and fill their epochs; each begins with its wait."""
    numbers = [(e, e * num_steps + s) for e in range(num_epochs) for s in range(num_steps)]
    assert places(trace, Category.step) == numbers
    assert places(trace, Category.epoch) == [(epoch, -1) for epoch in range(num_epochs)]
    steps, epochs = trace.of(Category.step), trace.of(Category.epoch)
    for epoch in epochs:
        mine = steps[steps["epoch"] == epoch["epoch"]]
        assert mine["start"][0] == epoch["start"]
        assert (mine["start"][1:] == stops(mine)[:-1]).all()
        assert stops(mine)[-1] <= stops(epoch)
    waits = trace.of(Category.wait)
    assert (waits["flags"] == Flag.exposed).all()
    for step in steps:
        (inside,) = waits[(waits["epoch"] == step["epoch"]) & (waits["step"] == step["step"])]
        assert step["start"] <= inside["start"]
        assert stops(inside) <= stops(step)


def test_a_loader_tells_of_steps_waits_and_epochs(data, tmp_path):
    with hs.trace.recording(tmp_path / "trace"), hs.Loader(data, batch_size=4) as loader:
        for _ in range(2):
            for _ in loader.numpy():
                pass
    trace = load_trace(tmp_path)
    check_epochs(trace, 2, 3)
    # What is read ahead belongs to the epoch and the step that it is read for.
    reads = trace.of(Category.read)
    reads = reads[(reads["nbytes"] == 8) & (reads["sample"] >= 0)]
    assert sorted(zip(reads["epoch"], reads["step"], strict=True))[:NUM] == (
        [(0, 0)] * 4 + [(0, 1)] * 4 + [(0, 2)] * 2
    )


def test_steps_of_other_loaders_are_told_by_a_wrapper(tmp_path):
    seen = []
    with hs.trace.recording(tmp_path):
        for epoch in range(2):
            seen += hs.trace.steps(iter(range(3)), epoch=epoch)
    assert seen == [0, 1, 2] * 2
    check_epochs(load_trace(tmp_path), 2, 3)


def test_a_wrapped_loader_of_ours_is_told_once(data, tmp_path):
    with hs.trace.recording(tmp_path / "trace"), hs.Loader(data, batch_size=4) as loader:
        for _ in hs.trace.steps(loader.numpy()):
            pass
    trace = load_trace(tmp_path)
    assert places(trace, Category.step) == [(0, 0), (0, 1), (0, 2)]
    assert len(trace.of(Category.wait)) == 3


def test_a_loop_within_a_loop_and_an_evaluation_only_wait(tmp_path):
    with hs.trace.recording(tmp_path):
        for _ in hs.trace.steps(range(2)):
            for _ in hs.trace.steps("abc"):
                pass
        with hs.trace.evaluation():
            for _ in hs.trace.steps("de"):
                pass
    trace = load_trace(tmp_path)
    assert places(trace, Category.step) == [(0, 0), (0, 1)]
    assert len(trace.of(Category.wait)) == 2 + 2 * 3 + 2
    assert len(trace.of(Category.evaluation)) == len(trace.of(Category.epoch)) == 1


def test_a_loop_that_somebody_still_holds_ends_with_the_next_one(data, tmp_path):
    with hs.trace.recording(tmp_path / "trace"), hs.Loader(data, batch_size=4) as loader:
        held = iter(loader.numpy())
        next(held)
        for _ in loader.numpy():
            pass
    trace = load_trace(tmp_path)
    assert places(trace, Category.step) == [(1, 3), (1, 4), (1, 5)]
    assert places(trace, Category.epoch) == [(0, -1), (1, -1)]


def test_a_loop_that_is_left_ends_its_epoch(tmp_path):
    with hs.trace.recording(tmp_path):
        for _ in hs.trace.steps(range(5)):
            break
        for _ in hs.trace.steps(range(1), epoch=1):
            pass
    assert places(load_trace(tmp_path), Category.epoch) == [(0, -1), (1, -1)]
    assert list(hs.trace.steps(range(3))) == [0, 1, 2]  # nothing is recorded
