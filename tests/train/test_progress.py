"""The bar on a terminal, and lines elsewhere."""

import io
import os
import pty
import time

import pytest

from hyperslab.train import progress
from hyperslab.train.progress import TrainProgress


def told(monkeypatch=None, **seconds):
    for name, value in seconds.items():
        monkeypatch.setattr(progress, name, value)
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
