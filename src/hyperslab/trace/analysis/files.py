"""The files that took longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyperslab.trace.span import Category, Trace

MOST_FILES = 20


@dataclass(frozen=True, slots=True)
class FileTimes:
    name: str
    num_reads: int
    seconds: float
    """Of threads."""
    slowest_seconds: float
    """Of one read."""
    nbytes: int
    lost_seconds: float
    """More than at the speed of the file in the middle."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def slowest_files(trace: Trace, most: int = MOST_FILES) -> list[FileTimes]:
    """Those that took the most time beyond what so many bytes of other files take."""
    reads = trace.spans[trace.spans["category"] == Category.read]
    names, num = reads["name"], len(trace.strings)
    counts = np.bincount(names, minlength=num)
    durations = np.maximum(reads["duration"], 0)
    seconds = np.bincount(names, weights=durations, minlength=num) / 1e9
    nbytes = np.bincount(names, weights=reads["nbytes"], minlength=num)
    slowest = np.zeros(num)
    np.maximum.at(slowest, names, durations / 1e9)
    timed = (nbytes > 0) & (seconds > 0)
    pace = float(np.median(seconds[timed] / nbytes[timed])) if timed.any() else 0.0
    lost = seconds - nbytes * pace
    is_path = np.array([any(sign in name for sign in "/\\.") for name in trace.strings], np.bool_)
    there = np.flatnonzero((counts > 0) & is_path)
    chosen = there[np.lexsort((-seconds[there], -lost[there]))][:most]
    return [
        FileTimes(
            name=trace.strings[each],
            num_reads=int(counts[each]),
            seconds=float(seconds[each]),
            slowest_seconds=float(slowest[each]),
            nbytes=int(nbytes[each]),
            lost_seconds=max(0.0, float(lost[each])),
        )
        for each in chosen
    ]
