"""Losses and times between two lines of a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyperslab.errors import HyperslabError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps since the last line of the log."""

    loss: float
    """The mean."""
    samples_per_second: float
    data_wait_share: float
    """Of the time, how much was spent waiting for batches."""


@dataclass
class Pace:
    """Collects what happens in steps, without waiting for the device."""

    _losses: list[Tensor] = field(default_factory=list)
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

    def add(self, loss: Tensor, num_samples: int) -> None:
        self._losses.append(loss.detach())
        self._num_samples += num_samples

    def rest(self) -> None:
        """Leaves out of the measured time what passed since the last step."""
        self._start, self._waited, self._num_samples = time.perf_counter(), 0.0, 0

    def settle(self, step: int) -> Stretch | None:
        """The stretch up to ``step``, or None if it has no steps; waits for the device.

        Raises if a loss is not a number: losses are the same on all ranks, and so is the error.
        """
        if not self._losses:
            return None
        losses = torch.stack(self._losses).double().tolist()
        _check(losses, step)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        stretch = Stretch(
            sum(losses) / len(losses), self._num_samples / seconds, min(1.0, self._waited / seconds)
        )
        self._losses.clear()
        self.rest()
        return stretch


def _check(losses: list[Any], step: int) -> None:
    for number, loss in enumerate(losses, step - len(losses) + 1):
        if not abs(loss) < float("inf"):
            raise HyperslabError(
                f"the loss became {loss} at step {number}: lower optimizer.lr, set train.clip, "
                "warm up (schedule.warmup_epochs), or look for such values in the data; all "
                "checkpoints are from before"
            )
