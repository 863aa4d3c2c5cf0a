"""Sets of moments: intervals that are merged, cut and measured, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
_NONE: Times = np.empty(0, np.int64)
_SELF, _OTHER, _BOTH = 1, 2, 3


@dataclass(frozen=True)
class Intervals:
    """Moments from ``starts[i]`` up to ``stops[i]``; these are sorted, apart, and never empty."""

    starts: Times = field(default_factory=lambda: _NONE)
    stops: Times = field(default_factory=lambda: _NONE)

    @classmethod
    def of(cls, starts: Times, stops: Times) -> Intervals:
        """The union of any intervals; those that do not last are left out.

        >>> Intervals.of(np.array([5, 0, 1]), np.array([7, 2, 4]))
        Intervals(starts=array([0, 5]), stops=array([4, 7]))
        """
        lasting = stops > starts
        if not lasting.all():
            starts, stops = starts[lasting], stops[lasting]
        if len(starts) < 2:
            return cls(starts, stops)
        if np.any(starts[1:] < starts[:-1]):
            order = np.argsort(starts, kind="stable")
            starts, stops = starts[order], stops[order]
        latest = np.maximum.accumulate(stops)
        begins = np.flatnonzero(starts[1:] > latest[:-1]) + 1
        return cls(
            starts[np.concatenate(([0], begins))],
            latest[np.concatenate((begins - 1, [len(latest) - 1]))],
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __or__(self, other: Intervals) -> Intervals:
        if not (len(self) and len(other)):
            return self if len(self) else other
        return Intervals.of(
            np.concatenate((self.starts, other.starts)), np.concatenate((self.stops, other.stops))
        )

    def __and__(self, other: Intervals) -> Intervals:
        return self._where(other, _BOTH)

    def __sub__(self, other: Intervals) -> Intervals:
        """The moments that are not in ``other``."""
        return self._where(other, _SELF) if len(other) else self

    def _where(self, other: Intervals, wanted: int) -> Intervals:
        """From a sweep over all ends."""
        if not len(self) or (not len(other) and wanted == _BOTH):
            return Intervals()
        ends = np.concatenate((self.starts, self.stops, other.starts, other.stops))
        changes = np.array([_SELF, -_SELF, _OTHER, -_OTHER], np.int8)
        changes = np.repeat(changes, [len(self), len(self), len(other), len(other)])
        order = np.argsort(ends, kind="stable")
        ends, states = ends[order], np.cumsum(changes[order], dtype=np.int8)
        inside = (states[:-1] == wanted) & (ends[1:] > ends[:-1])
        return Intervals.of(ends[:-1][inside], ends[1:][inside])

    @property
    def total(self) -> int:
        return int((self.stops - self.starts).sum())

    @cached_property
    def _lengths(self) -> Times:
        return np.concatenate(([0], np.cumsum(self.stops - self.starts)))

    def before(self, times: Times) -> Times:
        """How long of it lies before each of ``times``."""
        if not len(self):
            return np.zeros(len(times), np.int64)
        at = np.searchsorted(self.starts, times, side="right")
        over = np.where(at > 0, self.stops[at - 1] - times, 0)
        return self._lengths[at] - np.maximum(over, 0)

    def within(self, windows: Intervals) -> int:
        """How long of it lies in ``windows``."""
        return int((self.before(windows.stops) - self.before(windows.starts)).sum())

    def clipped(self, start: int, stop: int) -> Intervals:
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.starts, stop, side="left"))
        starts, stops = self.starts[first:last], self.stops[first:last]
        return Intervals(np.maximum(starts, start), np.minimum(stops, stop))

    def coarse(self, most: int) -> Intervals:
        """At most some ``most`` intervals, for a picture: short gaps are closed."""
        if len(self) <= most:
            return self
        gap = int(self.stops[-1] - self.starts[0]) // max(1, most)
        far = self.starts[1:] - self.stops[:-1] > gap
        return Intervals(
            self.starts[np.concatenate(([True], far))], self.stops[np.concatenate((far, [True]))]
        )


def union(sets: Iterable[Intervals]) -> Intervals:
    """All moments of any of ``sets``."""
    sets = [each for each in sets if len(each)]
    if len(sets) < 2:
        return sets[0] if sets else Intervals()
    return Intervals.of(
        np.concatenate([each.starts for each in sets]),
        np.concatenate([each.stops for each in sets]),
    )


def grouped(groups: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each number among ``groups``, and where it is, in order."""
    if not len(groups):
        return
    order = np.argsort(groups, kind="stable")
    changes = np.flatnonzero(np.diff(groups[order])) + 1
    for places in np.split(order, changes):
        yield int(groups[places[0]]), places


def amounts_before(
    times: Times, starts: Times, stops: Times, amounts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """How much was done before each of ``times``, if each amount came evenly over its interval."""
    if not len(starts):
        return np.zeros(len(times))
    origin = int(starts.min())
    rates = amounts / np.maximum(stops - starts, 1)
    total = np.zeros(len(times))
    for ends, sign in ((starts, 1.0), (np.maximum(stops, starts + 1), -1.0)):
        order = np.argsort(ends, kind="stable")
        at = np.searchsorted(ends[order], times, side="left")
        rate = np.concatenate(([0.0], np.cumsum(rates[order])))
        moment = np.concatenate(([0.0], np.cumsum(rates[order] * (ends[order] - origin))))
        total += sign * (rate[at] * (times - origin) - moment[at])
    return np.maximum(total, 0.0)
