"""What rank 0 writes down while a run goes on: each step and each evaluation once."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import FormatError
from hyperslab.io.partial import explained_writing
from hyperslab.train.log_file import Line, cut_log, to_json
from hyperslab.train.run_folder import RunFolder

_log = logging.getLogger("hyperslab")


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
