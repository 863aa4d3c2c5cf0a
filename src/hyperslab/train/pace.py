"""Losses and times between two lines of a log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

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

    def settle(self, explain: Callable[[float, StepPlace], str]) -> Stretch | None:
        """The stretch up to the last step, or None if it has no steps; waits for the device.

        Raises what ``explain`` says if a loss is not a number: losses are the same on all ranks,
        and so is the error.
        """
        if not self._losses:
            return None
        losses: list[float] = torch.stack(self._losses).double().tolist()
        for loss, place in zip(losses, self._places, strict=True):
            if not math.isfinite(loss):
                raise HyperslabError(explain(loss, place))
        seconds = max(time.perf_counter() - self._start, 1e-9)
        stretch = Stretch(
            sum(losses) / len(losses), self._num_samples / seconds, min(1.0, self._waited / seconds)
        )
        self._losses.clear()
        self._places.clear()
        self.rest()
        return stretch
