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
    return TrainProgress(20, 5, file=file), file


def test_lines_tell_where_training_is_without_control_characters(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar, file = told(monkeypatch, LINE_SECONDS=0.0)
    with bar:
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
            bar.step(step, 0)
            bar.step(step, 0, loss=1.0)
    assert [line.split()[3] for line in file.getvalue().splitlines()] == ["5/20", "10/20", "12/20"]


def test_other_ranks_are_mute(capsys):
    with TrainProgress(10, show=False) as bar:
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
        with TrainProgress(20, 5, file=file) as bar:
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
        "epoch 1/4 step 4/20",
        "20%",
        "loss 0.5",
        "data wait 50%",
    ):
        assert words in shown


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_step_costs_little(on_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    parent, child = pty.openpty() if on_terminal else (None, None)
    file = os.fdopen(child, "w") if on_terminal else io.StringIO()
    with file, TrainProgress(10**6, 100, file=file) as bar:
        start = time.process_time()
        for step in range(2000):
            bar.step(step, 0, loss=1.0, samples_per_second=1.0, data_wait_share=0.1)
        seconds = time.process_time() - start
    if parent is not None:
        os.close(parent)
    assert seconds / 2000 < 100e-6
