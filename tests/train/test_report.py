import io
import json
import os
import pty
import time
from datetime import timedelta

import pytest
import torch

from hyperslab.cli.output import draw
from hyperslab.comm.local_sockets import LocalSockets
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Grid
from hyperslab.train import report as report_module
from hyperslab.train.read_config import read_config
from hyperslab.train.report import Outcome, TrainProgress, start_report


def mesh(depth=1, device="cpu", backend=None, sockets=None):
    grid, timeout = Grid((1, 1, depth, 1, 1)), timedelta(seconds=1)
    return Mesh(grid, 0, torch.device(device), backend, timeout, sockets=sockets)


def report(*changes, on=None, **nums):
    parts = {name: [None] * num for name, num in {"train": 8, **nums}.items()}
    return start_report(read_config("cosmoflow-64", changes), on or mesh(), parts)


def test_a_run_says_what_is_held_back_and_how_it_was_chosen():
    told = report("data.validation=0.2", "data.test=held/*.h5", validation=2, test=3)[1]
    assert told == (
        "Data: 8 samples to train on; held back: 2 for validation (data.validation = 0.2, drawn by "
        "train.seed = 0), 3 for test (the files of data.test)"
    )
    assert "none for test (data.test = 0)" in report("data.test=0")[1]


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (mesh(), "Mesh: one rank on cpu, no messages"),
        (mesh(2, "cpu", "gloo"), "Mesh: depth=2, 2 ranks on cpu, messages by gloo; samples by sh"),
        (
            mesh(2, "cpu", "gloo", sockets=LocalSockets({})),
            "messages by gloo, small ones within a node by sockets; samples by sh",
        ),
        (mesh(2, "cuda", "cpu:gloo,cuda:nccl"), "2 ranks on cuda, messages by NCCL;"),
        (mesh(2, "cuda", "gloo"), "messages by gloo through host memory"),
    ],
    ids=["one", "gloo", "sockets", "nccl", "one-gpu"],
)
def test_a_run_says_which_mesh_and_what_carries_messages(on, words):
    assert words in report(on=on)[0]


def test_a_run_says_that_a_batch_is_larger_than_the_data():
    assert len(report("data.batch_size=8")) == 2
    assert "batch_size = 9 is larger than the 8 samples" in report("data.batch_size=9")[2]


# The bar on a terminal, and lines elsewhere


def told(monkeypatch=None, **seconds):
    for name, value in seconds.items():
        monkeypatch.setattr(report_module, name, value)
    file = io.StringIO()
    bar = TrainProgress(4, file=file)
    bar.begin(0, 0, 20)
    return bar, file


def test_lines_tell_where_training_is_without_control_characters(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar, file = told(monkeypatch, LINE_SECONDS=0.0)
    with bar:
        bar.begin(10, 2, 20)
        bar.step(11, 2, loss=0.12345, samples_per_second=45.6, data_wait_share=0.031)
        time.sleep(0.01)
        bar.step(12, 2)
        bar.scores("validation", {"loss": 0.5, "r2": 0.25, "r2/sigma_8": 0.1})
        bar.say("a [bold]line[/bold]")
    first, second, third, said = file.getvalue().splitlines()
    assert first == "epoch 3/4 step 11/20  loss 0.1235  45.6 samples/s  data wait 3%"
    assert second.startswith(
        "epoch 3/4 step 12/20  loss 0.1235  45.6 samples/s  data wait 3%  ETA 0:"
    )
    assert third == "epoch 3/4 step 12/20  validation: loss 0.5, r2 0.25"
    assert said == "a [bold]line[/bold]"
    assert file.getvalue().isprintable() is False  # newlines
    assert all(character.isprintable() for character in file.getvalue().replace("\n", ""))


def test_lines_come_now_and_then_and_at_the_end(monkeypatch):
    bar, file = told()
    with bar:
        for step in range(1, 20):
            bar.step(step, 0, loss=1.0)
    assert [line.split()[3] for line in file.getvalue().splitlines()] == ["19/20"]


def test_epochs_end_with_a_line(monkeypatch):
    bar, file = told(monkeypatch, EPOCH_SECONDS=0.0)
    with bar:
        for step in range(1, 13):
            bar.step(step, step // 5)
            bar.step(step, step // 5, loss=1.0)
    told_of = [line.split()[1:4:2] for line in file.getvalue().splitlines()]
    assert told_of == [["1/4", "5/20"], ["2/4", "10/20"], ["3/4", "12/20"]]


@pytest.mark.parametrize("position", [int, float])
def test_the_epoch_is_the_one_of_the_step(position, monkeypatch):
    bar, file = told(monkeypatch, LINE_SECONDS=0.0, EPOCH_SECONDS=0.0)
    with bar:
        for step in range(1, 21):
            bar.step(step, position(step / 5), loss=1.0)
    epochs = [line.split()[1] for line in file.getvalue().splitlines()]
    assert epochs == [f"{1 + (step - 1) // 5}/4" for step in range(1, 21)]


def test_a_run_that_goes_on_is_where_it_stood():
    bar, file = told()
    with bar:
        bar.begin(10, 2.0, 30)
        bar.say("Going on from step 10")
        bar.scores("validation", {"loss": 0.5})
        bar.step(11, 2)
    said, scores, last = file.getvalue().splitlines()
    assert said == "Going on from step 10"
    assert scores.startswith("epoch 3/4 step 10/30  validation")
    assert last.startswith("epoch 3/4 step 11/30")


def test_the_last_step_comes_before_what_is_said_after_it():
    bar, file = told()
    with bar:
        bar.step(19, 3, loss=1.0)
        bar.step(20, 4)
        bar.step(20, 4, loss=0.5)
        bar.scores("validation", {"loss": 0.25})
        bar.say("Evaluating on the test part")
    last, scores, said = file.getvalue().splitlines()
    assert last == "epoch 4/4 step 20/20  loss 0.5"
    assert scores == "epoch 4/4 step 20/20  validation: loss 0.25"
    assert said == "Evaluating on the test part"


def test_a_run_that_stops_early_tells_its_last_step_too():
    bar, file = told()
    with bar:
        bar.step(7, 1, loss=1.0)
        bar.say("Evaluating on the test part")
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["epoch", "Evaluating"]


def test_other_ranks_are_mute(capsys):
    with TrainProgress(2, show=False) as bar:
        bar.step(1, 0, loss=1.0)
        bar.scores("validation", {"loss": 1.0})
        bar.say("nothing")
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_is_gone_does_not_stop_training():
    bar, file = told()
    file.close()
    with bar:
        bar.say("nobody hears this")
        bar.step(1, 0)


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as file:
        with TrainProgress(4, file=file) as bar:
            bar.begin(3, 0, 20)
            bar.say("Going on from step 3")
            bar.scores("validation", {"r2": 0.25})
            bar.step(4, 0, loss=0.5, samples_per_second=12.0, data_wait_share=0.5)
        print("the end", file=file, flush=True)
        shown = ""
        while "the end" not in shown:
            shown += os.read(parent, 1 << 16).decode()
    os.close(parent)
    for words in (
        "Going on from step 3",
        "epoch 1/4 step 3/20",
        "epoch 1/4 step 4/20",
        "20%",
        "loss 0.5",
        "data wait 50%",
    ):
        assert words in shown


FOLDER = "/scratch/someone/a/rather/long/name/of/a/folder/with/runs/cosmoflow-128-again"
SUMMARY = {"folder": FOLDER, "state": "finished", "scores": {}, "figures": [], "weights": None}


def shown(**changes):
    return draw(Outcome({**SUMMARY, **changes}).report()).splitlines()


def cells(lines):
    return [line.split() for line in lines if not line.startswith("─")]


def test_how_a_run_ended_is_one_line():
    state = "stopped by SIGTERM at step 6; go on with --resume"
    assert shown(state=state) == [f"{FOLDER}: {state}"]


def test_scores_of_each_part_are_told_and_what_is_no_number_is_a_dash():
    scores = {"validation": {"loss": 0.25, "auc": None}, "test": {"loss": 1 / 3, "auc": 1.0}}
    lines = shown(scores=json.loads(json.dumps(scores)))
    assert cells(lines[1:]) == [
        ["score", "validation", "test"],
        ["loss", "0.25", "0.3333"],
        ["auc", "-", "1"],
    ]


def test_scores_by_name_have_a_row_for_each_name():
    found = {"loss": 1.0, "mae/sigma_8": 2.0, "mae/h/0": 3.0, "r2/sigma_8": 4.0, "r2/h/0": None}
    assert cells(shown(scores={"test": found})[1:]) == [
        ["score", "test"],
        ["loss", "1"],
        ["test", "test"],
        ["name", "mae", "r2"],
        ["sigma_8", "2", "4"],
        ["h/0", "3", "-"],
    ]


def test_where_figures_and_weights_are():
    lines = shown(figures=["runs/x/figures/a.png", "runs/x/figures/b.png"], weights="runs/x/w")
    assert lines[1:] == ["Figures: runs/x/figures (a.png, b.png)", "Weights: runs/x/w"]
