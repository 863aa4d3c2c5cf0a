"""The log of a run: whole lines of JSON, each step once."""

import json
import logging
import math
import sys

import pytest

import hyperslab as hs
from hyperslab.train.recorder import Recorder, cut_log, read_log, to_json
from hyperslab.train.run_folder import RunFolder


def recorder(path, *, tensorboard=False, begin=0):
    path.mkdir(exist_ok=True)
    made = Recorder(RunFolder(path), hs.init(device="cpu"), tensorboard=tensorboard)
    made.begin(begin)
    return made


def test_lines_are_json_and_there_as_soon_as_they_are_written(tmp_path):
    with recorder(tmp_path) as log:
        log.step(10, 0, loss=0.5, lr=1e-3, grad_norm=None, samples_per_second=3.0)
        log.scores("validation", 10, 1, {"loss": math.nan, "psnr": math.inf, "r2/sigma_8": 0.5})
        step, scores = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert step.pop("time") > 0
    assert step == {
        "kind": "step", "step": 10, "epoch": 0, "loss": 0.5, "lr": 1e-3, "grad_norm": None,
        "samples_per_second": 3.0,
    }  # fmt: skip
    assert (scores["part"], scores["loss"], scores["psnr"]) == ("validation", None, None)
    assert scores["r2/sigma_8"] == 0.5


def test_a_run_that_goes_on_writes_no_step_twice(tmp_path):
    with recorder(tmp_path) as log:
        for step in (10, 20, 30):
            log.step(step, 0, loss=float(step))
        log.scores("validation", 20, 0, {"loss": 1.0})
        log.scores("validation", 30, 0, {"loss": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 1')  # killed here
    with recorder(tmp_path, begin=20) as log:
        log.scores("validation", 20, 0, {"loss": 1.0})
        log.step(30, 0, loss=5.0)
    lines = read_log(tmp_path / "log.jsonl")
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 10), ("step", 20), ("scores", 20), ("step", 30),
    ]  # fmt: skip
    assert lines[-1]["loss"] == 5


def test_a_run_that_begins_anew_begins_an_empty_log(tmp_path):
    with recorder(tmp_path) as log:
        log.step(10, 0, loss=1.0)
    recorder(tmp_path).close()
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_what_is_no_line_of_a_log_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_log(path) == []
    path.write_bytes(b'[1]\n{"step": "x"}\n\xff\xfe\n{"step": 3}\nnull\n')
    assert read_log(path) == [{"step": 3}]
    assert cut_log(path, 3) == [{"step": 3}]
    assert path.read_text() == '{"step": 3}\n'


def test_what_json_does_not_know_becomes_null():
    text = to_json({"a": [math.nan, {"b": -math.inf}], "c": True, "d": 1})
    assert json.loads(text) == {"a": [None, {"b": None}], "c": True, "d": 1}


def test_tensorboard_has_the_same_numbers(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with recorder(tmp_path, tensorboard=True) as log:
        for step in (1, 2, 3):
            log.step(step, 0, loss=float(step), grad_norm=None)
    with recorder(tmp_path, tensorboard=True, begin=2) as log:
        log.step(3, 0, loss=30.0)
        log.scores("validation", 3, 1, {"r2/sigma_8": 0.5})
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]
    assert [e.value for e in found.Scalars("validation/r2/sigma_8")] == [0.5]


def test_without_tensorboard_a_warning_names_what_to_install(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING), recorder(tmp_path, tensorboard=True) as log:
        log.step(1, 0, loss=1.0)
    assert caplog.text.count("pip install 'hyperslab[train]'") == 1
    assert len(read_log(tmp_path / "log.jsonl")) == 1


def test_a_full_disk_is_a_warning_once_and_leaves_whole_lines(tmp_path, monkeypatch, caplog):
    import os

    write, num_writes = os.write, iter(range(100))

    def failing(fd, content):
        number = next(num_writes)
        if number == 1:
            return write(fd, content[:5])  # room for a part
        if number in (2, 3):
            raise OSError(28, "No space left on device")
        return write(fd, content)

    with caplog.at_level(logging.WARNING), recorder(tmp_path) as log:
        monkeypatch.setattr(os, "write", failing)
        for step in range(1, 7):
            log.step(step, 0, loss=1.0)
        monkeypatch.undo()
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 5, 6]
    assert caplog.text.count("lines of the log are missing: the disk is full") == 1


@pytest.mark.ranks(2)
def test_rank_0_alone_writes(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    with Recorder(RunFolder(tmp_path), mesh, tensorboard=True) as log:
        if mesh.rank == 1:
            log.begin(0)
            log.step(1, 0, loss=1.0)
            log.scores("validation", 1, 0, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
