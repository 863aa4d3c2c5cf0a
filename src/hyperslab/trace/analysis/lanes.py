"""Timelines that stay small: intervals as they are, or what they fill of each of many columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.intervals import Intervals, Times

MOST_INTERVALS = 2500
"""Of a lane that is drawn as it is."""
NUM_COLUMNS = 2000
LEAST_COLUMNS = 200
MOST_NUMBERS = 300_000
"""Of all lanes together."""
LANES_OF_RANK = 20

COLOURS = {
    "compute": "#4c956c",
    "optimizer": "#90be6d",
    "halo": "#d1603d",
    "all_reduce": "#f28482",
    "copy": "#e9c46a",
    "stage": "#1f6f8b",
    "read": "#2a6f97",
    "decode": "#48cae4",
    "exchange": "#9d5bd2",
    "wait": "#a3506f",
    "checkpoint": "#6d597a",
    "evaluation": "#b08968",
    "user": "#577590",
    "delay": "#adb5bd",
    "other": "#a9b4c0",
}
"""Of categories, in the order in which they are stacked."""


@dataclass(frozen=True)
class Lane:
    """When something went on, in a picture of a whole run."""

    intervals: Intervals | None
    """None where there are too many."""
    filled: NDArray[np.float64]
    """The share of each column, where there are no intervals."""

    @classmethod
    def of(cls, intervals: Intervals, edges: Times) -> Lane:
        if len(intervals) <= MOST_INTERVALS * (len(edges) - 1) // NUM_COLUMNS:
            return cls(intervals, np.empty(0))
        filled = np.diff(intervals.before(edges)) / np.maximum(np.diff(edges), 1)
        return cls(None, filled)


def columns_of(start: int, stop: int, num_ranks: int) -> Times:
    """The edges of columns from ``start`` to ``stop``: fewer, where there are many ranks."""
    num = MOST_NUMBERS // (LANES_OF_RANK * max(1, num_ranks))
    num = max(LEAST_COLUMNS, min(NUM_COLUMNS, num))
    return np.linspace(start, max(stop, start + num), num + 1).astype(np.int64)
