"""What a run tells the user: before its first step, while it goes on, and at its end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from hyperslab.comm.mesh import Mesh
from hyperslab.io import Dataset
from hyperslab.train.config import Config

# Before the first step: where it runs, what it learns from, what it holds back


def start_report(config: Config, mesh: Mesh, parts: Mapping[str, Dataset]) -> list[str]:
    """Lines for the user: the mesh, the samples of each part, and a batch that is too large."""
    lines = [_ranks(config, mesh), _samples(config, parts)]
    size, num = config.data.batch_size, len(parts["train"])
    if size > num:
        lines.append(
            f"Warning: data.batch_size = {size} is larger than the {num} samples to train on: "
            f"every step takes all {num}, and every epoch is one step"
        )
    return lines


def _ranks(config: Config, mesh: Mesh) -> str:
    if mesh.num_ranks == 1:
        return f"Mesh: one rank on {mesh.device}, no messages"
    store = ""
    if config.data.store == "memory":
        between = "MPI" if config.data.transport == "mpi" else "gloo"
        store = f"; samples by shared memory within a node, by {between} between nodes"
    return (
        f"Mesh: {mesh.grid.describe()}, {mesh.num_ranks} ranks on {mesh.device.type}, messages by "
        f"{mesh.messages_by}{store}"
    )


def _samples(config: Config, parts: Mapping[str, Dataset]) -> str:
    what = "tiles" if config.data.tile is not None else "samples"
    held = [_held_back(config, name, parts.get(name)) for name in ("validation", "test")]
    share = config.data.labelled_fraction
    few = "" if share == 1 else f" (data.labelled_fraction = {share:g})"
    return f"Data: {len(parts['train'])} {what} to train on{few}; held back: {', '.join(held)}"


def _held_back(config: Config, name: str, part: Dataset | None) -> str:
    chosen = getattr(config.data, name)
    if part is None:
        return f"none for {name} (data.{name} = {chosen:g})"
    if isinstance(chosen, int | float):
        how = f"data.{name} = {chosen:g}, drawn by train.seed = {config.train.seed}"
    else:
        how = f"the files of data.{name}"
    return f"{len(part)} for {name} ({how})"


# While it goes on, on rank 0's stderr: a live bar, or now and then a line

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

    def __init__(self, num_epochs: int, *, show: bool = True, file: TextIO | None = None) -> None:
        self._num_epochs = num_epochs
        self._num_steps: int | None = None
        self._file = (file or sys.stderr) if show else None
        self._bar: _Bar | None = None
        self._first: tuple[int, float] | None = None
        """The step that was told first, and when."""
        self._step, self._epochs_done = 0, 0
        self._ends_epoch = False
        """Whether the step that was told last was the last of an epoch."""
        self._told: dict[str, str] = {}
        self._scores = ""
        self._shown_step, self._shown_at = 0, time.monotonic()

    def __enter__(self) -> Self:
        if self._file is not None and _is_terminal(self._file):
            self._bar = _Bar(self._file)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._catch_up()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, step: int, epoch: float, num_steps: int, num_epochs: int | None = None) -> None:
        """Sets where training stands before its first step, and how many there will be in all.

        ``epoch`` is as for ``step``.
        """
        self._num_epochs = num_epochs or self._num_epochs
        self._step, self._epochs_done, self._num_steps = step, math.floor(epoch), num_steps
        self._ends_epoch, self._first = False, None
        self._shown_step, self._shown_at = step, time.monotonic()
        if self._bar is not None:
            self._bar.tell(step, num_steps, self._where(), "")
            self._bar.refresh()

    def step(
        self,
        step: int,
        epoch: float,
        *,
        loss: float | None = None,
        samples_per_second: float | None = None,
        data_wait_share: float | None = None,
    ) -> None:
        """After ``step`` steps; what is not given stays as it was.

        ``epoch`` is how many epochs are done, with or without the part of the one being done.
        """
        if self._file is None:
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        if step != self._step:
            self._ends_epoch = math.floor(epoch) > self._epochs_done
        self._step, self._epochs_done = step, math.floor(epoch)
        if loss is not None:
            self._told["loss"] = f"loss {loss:.4g}"
        if samples_per_second is not None:
            self._told["pace"] = f"{samples_per_second:.3g} samples/s"
        if data_wait_share is not None:
            self._told["wait"] = f"data wait {data_wait_share:.0%}"
        if now - self._shown_at >= self._patience(is_report=loss is not None):
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
        """A line that stays, after that of the last step."""
        self._catch_up()
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def _patience(self, *, is_report: bool) -> float:
        """The seconds to be silent after what was shown last."""
        if self._bar is not None:
            return BAR_SECONDS
        if is_report and self._step == self._num_steps:
            return 0.0
        return EPOCH_SECONDS if is_report and self._ends_epoch else LINE_SECONDS

    def _catch_up(self) -> None:
        if self._step != self._shown_step:
            self._show()

    def _show(self) -> None:
        self._shown_step, self._shown_at = self._step, time.monotonic()
        numbers = [text for text in (*self._told.values(), self._eta()) if text]
        if self._bar is not None:
            lines = "  ".join(numbers) + f"\n{self._scores}".rstrip()
            self._bar.tell(self._step, self._num_steps, self._where(), lines)
        else:
            self._print("  ".join([self._where(), *numbers]))

    def _where(self) -> str:
        """The epoch that the last step was of, or the next will be, and the step."""
        epoch = min(self._epochs_done + (not self._ends_epoch), self._num_epochs)
        of = "" if self._num_steps is None else f"/{self._num_steps}"
        return f"epoch {epoch}/{self._num_epochs} step {self._step}{of}"

    def _eta(self) -> str:
        """The time that the steps to come will take if they are like those since the first."""
        if self._first is None or self._num_steps is None:
            return ""
        (step, start), to_come = self._first, self._num_steps - self._step
        if self._step <= step or to_come <= 0:
            return ""
        seconds = (time.monotonic() - start) / (self._step - step) * to_come
        return f"ETA {timedelta(seconds=round(seconds))}"

    def _print(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(text, file=self._file, flush=True)


class _Bar(Progress):
    """A bar, and lines of numbers below it."""

    def __init__(self, file: TextIO) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        super().__init__(
            *columns,
            console=Console(file=file),
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # else it is for a program
        )
        self._task = self.add_task("", total=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self._numbers

    def tell(self, step: int, num_steps: int | None, where: str, numbers: str) -> None:
        self._numbers.plain = numbers
        self.update(self._task, completed=step, total=num_steps, description=where)


def _is_terminal(file: TextIO) -> bool:
    """Asked of the file, not of variables such as FORCE_COLOR, which also hold for log files."""
    return not file.closed and file.isatty() and os.environ.get("TERM", "dumb") != "dumb"


Scores = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    summary: dict[str, Any]
    exit_code: int = 0
    is_told: bool = True
    """Whether this process is the one to tell the user: rank 0, in a tournament of one trainer."""

    def report(self) -> list[RenderableType]:
        """How it ended, its scores, and where figures and weights are, as far as there are any."""
        summary = self.summary
        shown: list[RenderableType] = [Text(f"{summary['folder']}: {summary['state']}")]
        shown += _tables(summary["scores"])
        if figures := [Path(path) for path in summary["figures"]]:
            names = ", ".join(path.name for path in figures)
            shown.append(Text(f"Figures: {figures[0].parent} ({names})"))
        if summary["weights"]:
            shown.append(Text(f"Weights: {summary['weights']}"))
        return shown


def _tables(parts: Mapping[str, Scores]) -> list[Table]:
    """The scores of each part, then those by name (``mae/sigma_8``), with a row for each name."""
    keys = list(dict.fromkeys(key for scores in parts.values() for key in scores))
    plain = [key for key in keys if "/" not in key]
    named = [key.split("/", 1) for key in keys if "/" in key]
    kinds = list(dict.fromkeys(kind for kind, _ in named))
    tables = []
    if plain:
        rows = {key: [scores.get(key) for scores in parts.values()] for key in plain}
        tables.append(_table("score", list(parts), rows))
    if named:
        columns = [f"{part}\n{kind}" for part in parts for kind in kinds]
        rows = {
            name: [scores.get(f"{kind}/{name}") for scores in parts.values() for kind in kinds]
            for _, name in named
        }
        tables.append(_table("name", columns, rows))
    return tables


def _table(first: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> Table:
    """Numbers in rows; None, which is what becomes of NaN, is a dash."""
    table = Table(first, box=box.SIMPLE, padding=(0, 1), show_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, numbers in rows.items():
        cells = ("-" if number is None else f"{number:.4g}" for number in numbers)
        table.add_row(Text(name), *cells)
    return table
