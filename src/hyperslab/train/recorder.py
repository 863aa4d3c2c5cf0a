"""The log of a run, as rank 0 writes it: each step and each evaluation once."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import FormatError, HyperslabError
from hyperslab.partial import explained_writing, write_file
from hyperslab.train.run_folder import RunFolder, to_json

_log = logging.getLogger("hyperslab")

# The file: a line of JSON for every report

Line: TypeAlias = dict[str, Any]


def read_log(path: Path) -> list[Line]:
    """All whole lines, in order, without those that a killed run tore; none if there is no file."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    return list(_whole_lines(text))


def _whole_lines(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield found


def cut_log(path: Path, step: int) -> list[Line]:
    """Keeps the lines up to ``step`` alone, and gives them; the file is never half written."""
    with explained_writing(path):
        kept = [line for line in read_log(path) if line["step"] <= step]
    write_file(path, "".join(to_json(line) + "\n" for line in kept))
    return kept


# Losses and times between two lines of a log

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps since the last line of the log."""

    loss: float
    """The mean."""
    samples_per_second: float
    data_wait_share: float
    """Of the time, how much was spent waiting for batches."""


@dataclass(frozen=True, slots=True)
class StepPlace:
    """A step of the optimizer: its number, and which samples it was made with."""

    step: int
    epoch: int
    start: int
    """Of its samples in the order of the epoch."""
    lr: float


@dataclass
class Pace:
    """Collects what happens in steps, without waiting for the device."""

    _losses: list[Tensor] = field(default_factory=list)
    _places: list[StepPlace] = field(default_factory=list)
    _num_samples: int = 0
    _waited: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """``batches``, with the time that each was waited for."""
        following = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(following)
            except StopIteration:
                return
            self._waited += time.perf_counter() - start
            yield batch

    def add(self, loss: Tensor, num_samples: int, place: StepPlace) -> None:
        self._losses.append(loss.detach())
        self._places.append(place)
        self._num_samples += num_samples

    def rest(self) -> None:
        """Leaves out of the measured time what passed since the last step."""
        self._start, self._waited, self._num_samples = time.perf_counter(), 0.0, 0

    def finish(self, explain: Callable[[float, StepPlace], str] | None) -> Stretch | None:
        """The stretch up to the last step, or None if it has no steps; waits for the device.

        Raises what ``explain`` says, if there is one, of a loss that is not a number: losses are
        the same on all ranks, and so is the error.
        """
        if not self._losses:
            return None
        losses: list[float] = torch.stack(self._losses).double().tolist()
        for loss, place in zip(losses, self._places, strict=True):
            if explain is not None and not math.isfinite(loss):
                raise HyperslabError(explain(loss, place))
        seconds = max(time.perf_counter() - self._start, 1e-9)
        stretch = Stretch(
            sum(losses) / len(losses), self._num_samples / seconds, min(1.0, self._waited / seconds)
        )
        self._losses.clear()
        self._places.clear()
        self.rest()
        return stretch


class Recorder:
    """Lines of JSON in ``log.jsonl``, and TensorBoard's events; ranks other than 0 write nothing.

    Where a line cannot be written, as on a full disk, a warning says so once, and the run goes on.
    """

    def __init__(self, folder: RunFolder, mesh: Mesh, *, tensorboard: bool) -> None:
        self._folder, self._is_writer = folder, mesh.rank == 0
        self._uses_tensorboard = tensorboard
        self._events: Any = None
        self._fd: int | None = None
        self._has_warned = self._is_torn = False
        self._written: set[tuple[Any, ...]] = set()

    def begin(self, step: int) -> None:
        """Opens the log to go on after ``step``; what was written of later steps is removed."""
        if not self._is_writer:
            return
        try:
            self._written = {_key(line) for line in cut_log(self._folder.log, step)}
            with explained_writing(self._folder.log):
                self._fd = os.open(self._folder.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)
        except FormatError as error:
            self._warn(error)
        if self._uses_tensorboard:
            self._events = self._open_events(step)

    def step(self, step: int, epoch: int, **values: float | None) -> None:
        """One report of training: the loss, the learning rate, how fast it goes."""
        self._write({"kind": "step", "step": step, "epoch": epoch, **values})
        self._chart("train", values, step)

    def scores(self, part: str, step: int, epoch: int, scores: dict[str, float]) -> None:
        """One evaluation of ``part``, such as ``validation``."""
        self._write({"kind": "scores", "part": part, "step": step, "epoch": epoch, **scores})
        self._chart(part, scores, step)

    def shares(self, step: int, shares: Mapping[str, float]) -> None:
        """What an epoch that ended with ``step`` waited for, for TensorBoard alone."""
        self._chart("trace", dict(shares), step)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._events is not None:
            with suppress(OSError):
                self._events.close()
            self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._fd is None or _key(line) in self._written:
            return
        self._written.add(_key(line))
        text = to_json({**line, "time": round(time.time(), 3)})
        content = ("\n" * self._is_torn + text + "\n").encode()
        try:
            with explained_writing(self._folder.log):
                self._is_torn = os.write(self._fd, content) < len(content)
        except FormatError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("lines of the log are missing: %s", error)

    def _open_events(self, step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            _log.warning(
                "nothing for TensorBoard, which is not installed: pip install 'hyperslab[train]', "
                "or set run.tensorboard = false"
            )
            return None
        try:
            return SummaryWriter(str(self._folder.tensorboard), purge_step=step + 1)
        except OSError as error:
            self._warn(error)
            return None

    def _chart(self, part: str, values: dict[str, Any], step: int) -> None:
        if self._events is None:
            return
        try:
            for key, value in values.items():
                if value is not None:
                    self._events.add_scalar(f"{part}/{key}", value, step)
        except OSError as error:
            self._warn(error)
            self._events = None


def _key(line: Line) -> tuple[Any, ...]:
    """What no two lines have in common."""
    return line.get("kind"), line.get("part"), line["step"]
