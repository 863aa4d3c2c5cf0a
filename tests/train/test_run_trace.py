"""The trace of a run: what it has of every epoch, how it goes on, and that it stops nothing."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from hyperslab import trace
from hyperslab.trace import Category, Flag, load_trace
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

SETTINGS = [
    "model.options={size = 16, base_channels = 1}",
    "data.batch_size=2",
    "data.validation=0.25",
    "data.test=0",
    "mesh.device=cpu",
    "train.epochs=2",
    "run.tensorboard=false",
    "run.figures=false",
]
NUM_STEPS = 3
"""Of an epoch: two of eight cubes are for validation."""


def train(folder, files, *changes, resume=False):
    changes = [f"data.files={files['cosmo']}", f"run.folder={folder}", *SETTINGS, *changes]
    return run(read_config("cosmoflow-64", changes), resume=resume)


def seconds(spans):
    return spans["duration"].sum() / 1e9


def stops(spans):
    return spans["start"] + spans["duration"]


def check_epochs(found, process):
    """Steps follow one another, fill what of an epoch is no evaluation, and hold what they did."""
    spans = found.spans[found.spans["process"] == process]

    def of(category):
        return spans[spans["category"] == category]

    epochs, steps = of(Category.epoch), of(Category.step)
    assert epochs["epoch"].tolist() == [0, 1]
    assert steps["step"].tolist() == list(range(2 * NUM_STEPS))
    for epoch in epochs:
        mine = steps[steps["epoch"] == epoch["epoch"]]
        assert mine["start"][0] == epoch["start"]
        assert (mine["start"][1:] == stops(mine)[:-1]).all()
        late = of(Category.evaluation), of(Category.checkpoint)
        after = [each for kind in late for each in kind if each["epoch"] == epoch["epoch"]]
        assert len(after) >= 2
        assert all(each["start"] >= stops(mine)[-1] for each in after)
        assert all(each["start"] < stops(epoch) for each in after)
    main = steps["thread"][0]
    for category in (Category.wait, Category.compute, Category.optimizer):
        inside = of(category)
        inside = inside[inside["step"] >= 0]
        assert sorted(set(inside["step"].tolist())) == list(range(2 * NUM_STEPS)), category
        assert set(inside["thread"].tolist()) == {main}
        for each in inside:
            (step,) = steps[steps["step"] == each["step"]]
            assert step["start"] <= each["start"]
            assert each["start"] + each["duration"] <= step["start"] + step["duration"]
    # What the loop does itself comes one after another, and is not longer than the steps.
    loop = spans[np.isin(spans["category"], (Category.wait, Category.compute, Category.optimizer))]
    loop = np.sort(loop[loop["step"] >= 0], order="start")
    assert (stops(loop)[:-1] <= loop["start"][1:]).all()
    assert 0 < seconds(loop) <= seconds(steps) <= seconds(epochs)


READERS = (Category.read, Category.exchange, Category.copy, Category.delay)
OWN = (Category.wait, Category.compute, Category.optimizer, Category.checkpoint)
SPLIT = (Category.halo, Category.all_reduce)


def test_a_run_has_all_that_it_did_in_its_trace(files, tmp_path):
    train(tmp_path / "run", files)
    found = load_trace(tmp_path / "run")
    assert found.notes == []
    check_epochs(found, 0)
    for category in (*READERS, *OWN, Category.evaluation):
        assert len(found.of(category)), category
    assert set(found.of(Category.wait)["flags"].tolist()) == {Flag.exposed}
    exchanged = found.of(Category.exchange)
    in_epoch = [int(exchanged["nbytes"][exchanged["epoch"] == e].sum()) for e in (0, 1)]
    assert in_epoch[0] == in_epoch[1] > 0
    reads = found.of(Category.read)
    assert reads["nbytes"][reads["epoch"] == 0].sum() >= in_epoch[0]


@pytest.mark.ranks(2)
def test_ranks_have_a_file_each_and_their_messages_in_it(files, tmp_path):
    train(tmp_path / "run", files, "mesh.depth=2", "run.trace=detailed")
    found = load_trace(tmp_path / "run")
    assert [process.rank for process in found.processes] == [0, 1]
    for process in (0, 1):
        check_epochs_of_rank(found, process)


def check_epochs_of_rank(found, process):
    mine = found.spans[found.spans["process"] == process]
    for category in (*READERS, *OWN, *SPLIT, Category.evaluation):
        assert (mine["category"] == category).any(), category
    epochs = mine[mine["category"] == Category.epoch]
    assert seconds(mine[mine["category"] == Category.step]) <= seconds(epochs)
    halos = mine[mine["category"] == Category.halo]
    assert (halos["flags"] == Flag.exposed).sum() * 2 == len(halos)
    layers = {found.strings[number] for number in halos["layer"]}
    assert len(layers) > 3


def test_a_run_that_goes_on_adds_to_its_trace(files, tmp_path):
    train(tmp_path / "run", files, "train.steps=4")
    train(tmp_path / "run", files, resume=True)
    folder = tmp_path / "run" / "trace"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["rank00000.1.hstrace", "rank00000.hstrace"]
    steps = load_trace(tmp_path / "run").of(Category.step)
    assert steps["step"].tolist() == list(range(6))
    assert steps["epoch"].tolist() == [0, 0, 0, 1, 1, 1]


def test_the_trace_of_a_run_that_left_no_checkpoint_makes_way(files, tmp_path):
    folder = tmp_path / "run"
    train(folder, files, "train.epochs=1")
    shutil.rmtree(folder / "checkpoints")
    for name in ("summary.json", "model.safetensors"):
        (folder / name).unlink()
    train(folder, files, "train.epochs=1")
    assert [path.name for path in (folder / "trace").iterdir()] == ["rank00000.hstrace"]
    assert load_trace(folder).of(Category.step)["step"].tolist() == [0, 1, 2]


def test_batches_that_make_a_step_together_are_one_step(files, tmp_path):
    train(tmp_path / "run", files, "train.accumulate=2", "train.epochs=1")
    found = load_trace(tmp_path / "run")
    assert found.of(Category.step)["step"].tolist() == [0, 1, 2]
    waits = found.of(Category.wait)
    assert np.bincount(waits["step"][waits["step"] >= 0]).tolist() == [2, 2, 2]


def test_a_run_without_a_trace_has_none(files, tmp_path):
    train(tmp_path / "run", files, "run.trace=off", "train.epochs=1")
    assert not (tmp_path / "run" / "trace").exists()


class Told:
    def to_dict(self):
        categories = {"read": {"exposed_seconds": 1.0}, "halo": {"exposed_seconds": 0.5}}
        epochs = [{"epoch": n, "seconds": 4.0, "categories": categories} for n in (0, 1, 7)]
        return {"epochs": epochs}


def test_the_report_is_written_when_all_is_recorded_and_tensorboard_has_its_shares(
    files, tmp_path, monkeypatch
):
    folder, seen = tmp_path / "run", []

    def write_report(path):
        seen.append((path, len(load_trace(path).of(Category.epoch))))
        return Told()

    monkeypatch.setattr(trace, "write_report", write_report, raising=False)
    train(folder, files, "run.tensorboard=true")
    assert seen == [(folder, 2)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name, share in (("read", 0.25), ("halo", 0.125)):
        scalars = events.Scalars(f"trace/{name}_share")
        assert [(each.step, each.value) for each in scalars] == [(3, share), (6, share)]


def test_a_report_that_fails_does_not_fail_the_run(files, tmp_path, monkeypatch, caplog):
    def write_report(path):
        raise ZeroDivisionError("of the report")

    monkeypatch.setattr(trace, "write_report", write_report, raising=False)
    outcome = train(tmp_path / "run", files, "train.epochs=1")
    assert outcome.summary["state"] == "finished"
    assert "was not reported (ZeroDivisionError: of the report): hyperslab trace report" in (
        caplog.text
    )


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_its_trace(files, tmp_path):
    """The child says where it is by the log, and is killed in its fourth step."""
    folder = tmp_path / "run"
    pid = os.fork()
    if not pid:
        train(folder, files, "train.epochs=10000", "run.log_every=1")
        os._exit(0)
    while not (folder / "log.jsonl").exists() or len(steps_of(folder)) < 4:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert len(steps_of(folder)) >= 4
    assert any(json.loads(line)["step"] == 4 for line in lines)


def steps_of(folder):
    if not list((folder / "trace").glob("*.hstrace")):
        return []
    return load_trace(folder).of(Category.step)
