"""How far training has come, on rank 0's stderr: a live bar, or now and then a line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

BAR_SECONDS = 0.1
LINE_SECONDS = 10.0
"""From one line to the next, without a terminal."""
EPOCH_SECONDS = 2.0
"""The same at the end of epochs, of which there may be many."""
MOST_SCORES = 4


class TrainProgress:
    """Told of every step and every evaluation; with ``show=False``, as on other ranks, it is mute.

    On a terminal there is a live bar. Elsewhere, as in a file, plain lines come every ten seconds
    and at the end of epochs.
    """

    def __init__(
        self,
        num_steps: int,
        steps_per_epoch: int | None = None,
        *,
        show: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self._num_steps, self._steps_per_epoch = num_steps, steps_per_epoch
        self._file = (file or sys.stderr) if show else None
        self._bar: _Bar | None = None
        self._first: tuple[int, float] | None = None
        """The step that was told first, and when."""
        self._step = self._epoch = 0
        self._told: dict[str, str] = {}
        self._scores = ""
        self._shown_step, self._shown_at = 0, time.monotonic()

    def __enter__(self) -> Self:
        if self._file is not None and _is_terminal(self._file):
            self._bar = _Bar(self._file, self._num_steps)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._step != self._shown_step:
            self._show()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(
        self,
        step: int,
        epoch: int,
        *,
        loss: float | None = None,
        samples_per_second: float | None = None,
        data_wait_share: float | None = None,
    ) -> None:
        """After ``step`` steps and ``epoch`` epochs; what is not given stays as it was."""
        if self._file is None:
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        self._step, self._epoch = step, epoch
        if loss is not None:
            self._told["loss"] = f"loss {loss:.4g}"
        if samples_per_second is not None:
            self._told["pace"] = f"{samples_per_second:.3g} samples/s"
        if data_wait_share is not None:
            self._told["wait"] = f"data wait {data_wait_share:.0%}"
        if now - self._shown_at > self._patience(is_report=loss is not None):
            self._show()

    def scores(self, part: str, scores: Mapping[str, float]) -> None:
        """After an evaluation of ``part``."""
        if self._file is None:
            return
        few = [f"{name} {value:.4g}" for name, value in scores.items() if "/" not in name]
        self._scores = f"{part}: {', '.join(few[:MOST_SCORES])}"
        if self._bar is not None:
            self._show()
        else:
            self._print(f"{self._where()}  {self._scores}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def _patience(self, *, is_report: bool) -> float:
        """The seconds to be silent after what was shown last."""
        if self._bar is not None:
            return BAR_SECONDS
        ends_epoch = self._steps_per_epoch and self._step % self._steps_per_epoch == 0
        return EPOCH_SECONDS if ends_epoch and is_report else LINE_SECONDS

    def _show(self) -> None:
        self._shown_step, self._shown_at = self._step, time.monotonic()
        numbers = [text for text in (*self._told.values(), self._eta()) if text]
        if self._bar is not None:
            lines = "  ".join(numbers) + f"\n{self._scores}".rstrip()
            self._bar.tell(self._step, self._where(), lines)
        else:
            self._print("  ".join([self._where(), *numbers]))

    def _where(self) -> str:
        if not self._steps_per_epoch:
            return f"epoch {self._epoch} step {self._step}/{self._num_steps}"
        epoch, num_epochs = (
            -(-steps // self._steps_per_epoch) for steps in (self._step, self._num_steps)
        )
        return f"epoch {epoch}/{num_epochs} step {self._step}/{self._num_steps}"

    def _eta(self) -> str:
        """The time that the steps to come will take if they are like those since the first."""
        if self._first is None or self._step <= self._first[0] or self._step >= self._num_steps:
            return ""
        step, start = self._first
        seconds = (time.monotonic() - start) / (self._step - step) * (self._num_steps - self._step)
        return f"ETA {timedelta(seconds=round(seconds))}"

    def _print(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(text, file=self._file, flush=True)


class _Bar(Progress):
    """A bar, and lines of numbers below it."""

    def __init__(self, file: TextIO, num_steps: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        super().__init__(
            *columns,
            console=Console(file=file),
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # else it is for a program
        )
        self._task = self.add_task("", total=num_steps)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self._numbers

    def tell(self, step: int, where: str, numbers: str) -> None:
        self._numbers.plain = numbers
        self.update(self._task, completed=step, description=where)


def _is_terminal(file: TextIO) -> bool:
    """Asked of the file, not of variables such as FORCE_COLOR, which also hold for log files."""
    return not file.closed and file.isatty() and os.environ.get("TERM", "dumb") != "dumb"
