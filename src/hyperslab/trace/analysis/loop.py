"""The main loop of a rank: its spans, and when its epochs and steps began and ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.intervals import Intervals, Times, grouped, union
from hyperslab.trace.span import Category, Flag, Process, Trace

READERS = (Category.stage, Category.read, Category.decode, Category.exchange)
"""What reader threads do, for batches to come."""
_OF_THE_LOOP = (Category.step, Category.epoch, Category.wait, Category.optimizer)
_PASSES = (Category.compute, Category.halo, Category.all_reduce)
NUM_BINS = 50
"""Parts of an epoch whose steps are not known."""


@dataclass(frozen=True)
class Step:
    """What a rank did from the end of one step to the end of the next."""

    epoch: int
    number: int
    start: int
    stop: int


class Rank:
    """The spans of a rank, of all its processes."""

    def __init__(self, rank: int, trace: Trace, spans: NDArray[Any]) -> None:
        self.rank, self.trace, self.spans = rank, trace, spans
        self.starts: Times = np.ascontiguousarray(spans["start"])
        self.stops: Times = self.starts + np.maximum(spans["duration"], 0)
        self.categories: NDArray[np.uint8] = np.ascontiguousarray(spans["category"])
        self.flags: NDArray[np.uint16] = np.ascontiguousarray(spans["flags"])
        self.on_device = (self.flags & Flag.device) != 0
        self.exposed = (self.flags & Flag.exposed) != 0

    @property
    def processes(self) -> list[Process]:
        return [each for each in self.trace.processes if each.rank == self.rank]

    def chosen(self, category: Category, among: NDArray[np.bool_] | None = None) -> Intervals:
        """When there was a span of a category, all threads together."""
        found = self.categories == category
        if among is not None:
            found &= among
        return Intervals.of(self.starts[found], self.stops[found])

    @cached_property
    def by_category(self) -> dict[Category, Intervals]:
        """Those that there are."""
        there = np.unique(self.categories)
        return {Category(each): self.chosen(Category(each)) for each in there}

    @cached_property
    def on_loop(self) -> NDArray[np.bool_]:
        """Which spans are of the threads that go through steps; of all, if that is not told."""
        signs = (np.isin(self.categories, _OF_THE_LOOP) | self.exposed) & ~self.on_device
        threads = np.unique(self.spans["thread"][signs])
        found: NDArray[np.bool_] = ~self.on_device
        if len(threads):
            found &= np.isin(self.spans["thread"], threads)
        return found

    def lies_in(self, windows: Intervals) -> NDArray[np.bool_]:
        """Which spans begin and end within one of ``windows``."""
        if not len(windows):
            return np.zeros(len(self.spans), np.bool_)
        at = np.maximum(np.searchsorted(windows.starts, self.starts, side="right") - 1, 0)
        found: NDArray[np.bool_] = windows.starts[at] <= self.starts
        found &= self.stops <= windows.stops[at]
        return found

    @cached_property
    def extent(self) -> Intervals:
        """While processes of the rank did anything."""
        places = [where for _, where in grouped(self.spans["process"])]
        starts = [int(self.starts[where].min()) for where in places]
        stops = [int(self.stops[where].max()) for where in places]
        return Intervals.of(np.array(starts, np.int64), np.array(stops, np.int64))

    @cached_property
    def epochs(self) -> dict[int, Intervals]:
        """By number: from their own spans, else from the numbers that spans of the loop bear.

        One that was broken off and went on in another process has parts of both. Where no span
        tells of epochs, all of it is epoch 0.
        """
        parts: dict[int, list[Intervals]] = {}
        for of in self._loops:
            told = self._told_epochs(of)
            known = union(told.values())
            for number, window in self._numbered_epochs(of).items():
                told.setdefault(number, window - known)
            for number, window in told.items():
                parts.setdefault(number, []).append(window)
        found = {number: union(parts[number]) for number in sorted(parts)}
        found = {number: window for number, window in found.items() if len(window)}
        return found or ({0: self.extent} if len(self.extent) else {})

    @property
    def broken_off(self) -> dict[int, int]:
        """Epochs that a loop which tells its steps has not ended, with how many steps it made."""
        found: dict[int, int] = {}
        for of in self._loops:
            steps = of & (self.categories == Category.step) & ~self.on_device
            told, numbered = self._told_epochs(of), self._numbered_epochs(of)
            if not steps.any() or (not told and len(numbered) > 1):
                continue  # of another tool, which knows no ends
            for number in numbered.keys() - told.keys():
                num_steps = np.count_nonzero(self.spans["epoch"][steps] == number)
                found[number] = found.get(number, 0) + int(num_steps)
        return found

    @cached_property
    def _makes_epochs(self) -> NDArray[np.bool_]:
        """Spans of the loop: what readers do is for batches to come, of the next epoch as well."""
        found: NDArray[np.bool_] = self.on_loop | self.on_device
        found &= np.isin(self.categories, (*_OF_THE_LOOP, *_PASSES))
        return found

    @cached_property
    def _loops(self) -> list[NDArray[np.bool_]]:
        """The spans of each process that has a loop; all of them together, if not several have."""
        processes = self.spans["process"]
        found = np.unique(processes[self._makes_epochs])
        if len(found) < 2:
            return [np.ones(len(self.spans), np.bool_)]
        return [processes == each for each in found]

    def _told_epochs(self, of: NDArray[np.bool_]) -> dict[int, Intervals]:
        where = np.flatnonzero(of & (self.categories == Category.epoch) & ~self.on_device)
        numbers = self.spans["epoch"][where].copy()
        unnumbered = numbers < 0
        numbers[unnumbered] = np.arange(np.count_nonzero(unnumbered))
        return {
            number: Intervals.of(self.starts[where[among]], self.stops[where[among]])
            for number, among in grouped(numbers)
        }

    def _numbered_epochs(self, of: NDArray[np.bool_]) -> dict[int, Intervals]:
        numbers = self.spans["epoch"]
        is_numbered = of & (numbers >= 0) & (self.categories != Category.epoch)
        of_loop = is_numbered & self._makes_epochs
        base = of_loop if self._makes_epochs.any() else is_numbered
        found, reached = {}, np.iinfo(np.int64).min
        firsts = _extremes(numbers[is_numbered], self.starts[is_numbered], np.minimum)
        lasts = _extremes(numbers[base], self.stops[base], np.maximum)
        for number, stop in lasts.items():
            start = max(firsts[number], reached)
            reached = max(stop, reached)
            found[number] = Intervals.of(np.array([start]), np.array([stop]))
        return found

    @cached_property
    def steps(self) -> list[Step]:
        """Those of all epochs, one after another; each reaches back to the end of the last."""
        ends = self._step_ends()
        found: list[Step] = []
        for epoch, windows in self.epochs.items():
            number = 0
            for start, stop in zip(windows.starts.tolist(), windows.stops.tolist(), strict=True):
                inside = ends[(ends > start) & (ends <= stop)]
                if not len(inside):
                    inside = np.linspace(start, stop, NUM_BINS + 1)[1:].astype(np.int64)
                inside[-1] = stop
                for begin, end in zip([start, *inside[:-1].tolist()], inside.tolist(), strict=True):
                    found.append(Step(epoch, number, begin, end))
                    number += 1
        return found

    @property
    def has_steps(self) -> bool:
        return len(self._step_ends()) > 0

    def _step_ends(self) -> Times:
        told = (self.categories == Category.step) & ~self.on_device
        if told.any():
            return np.unique(self.stops[told])
        numbered = (self.spans["step"] >= 0) & self.on_loop
        ends = _extremes(self.spans["step"][numbered], self.stops[numbered], np.maximum)
        return np.unique(np.array([*ends.values()], np.int64))

    def edges(self) -> tuple[Times, Times]:
        """The starts and the stops of ``steps``."""
        starts = np.array([step.start for step in self.steps], np.int64)
        return starts, np.array([step.stop for step in self.steps], np.int64)


def _extremes(numbers: NDArray[Any], times: Times, extreme: np.ufunc) -> dict[int, int]:
    """The least or the largest time of each number, by numbers."""
    if not len(numbers):
        return {}
    order = np.argsort(numbers, kind="stable")
    firsts = np.flatnonzero(np.diff(numbers[order], prepend=numbers[order][0] - 1))
    found = extreme.reduceat(times[order], firsts)
    return dict(zip(numbers[order][firsts].tolist(), found.tolist(), strict=True))


def ranks_of(trace: Trace) -> Iterator[Rank]:
    """The ranks that have spans, one after another."""
    rank_of = np.array([process.rank for process in trace.processes] or [0], np.int64)
    for rank in sorted(set(rank_of.tolist())):
        of = np.isin(trace.spans["process"], np.flatnonzero(rank_of == rank))
        if of.any():
            yield Rank(rank, trace, trace.spans if of.all() else trace.spans[of])
