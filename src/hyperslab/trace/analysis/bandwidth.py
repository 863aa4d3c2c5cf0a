"""How many bytes a second came from where, and how that grew with reads side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.intervals import Times, amounts_before
from hyperslab.trace.span import Category, Tier, Trace

NUM_BINS = 200
MOST_RANKS = 32
"""Whose bandwidths are told one by one."""
MOST_LEVELS = 64
LEAST_SIZE = 0.25
"""Of a large read: those that are smaller are not told of, side by side."""
MOVING = (Category.exchange, Category.copy, Category.halo, Category.all_reduce)


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second in parts of the run of equal length."""

    seconds: float
    """Of one part."""
    total: dict[str, NDArray[np.float64]]
    of_ranks: dict[int, dict[str, NDArray[np.float64]]]


def bandwidth_of(trace: Trace, starts: Times, stops: Times) -> Bandwidth:
    if not len(starts):
        return Bandwidth(0.0, {}, {})
    edges = np.linspace(int(starts.min()), int(stops.max()), NUM_BINS + 1).astype(np.int64)
    seconds = float(edges[-1] - edges[0]) / NUM_BINS / 1e9 or 1e-9
    rank_of = np.array([process.rank for process in trace.processes] or [0], np.int64)
    ranks = sorted(set(rank_of.tolist()))
    has_bytes = trace.spans["nbytes"] > 0
    total: dict[str, NDArray[np.float64]] = {}
    of_ranks: dict[int, dict[str, NDArray[np.float64]]] = {rank: {} for rank in ranks}
    for name, chosen in _series(trace, has_bytes).items():
        nbytes = trace.spans["nbytes"][chosen]
        begin, end = starts[chosen], stops[chosen]
        total[name] = np.diff(amounts_before(edges, begin, end, nbytes)) / seconds
        if not 1 < len(ranks) <= MOST_RANKS:
            continue
        mine = rank_of[trace.spans["process"][chosen]]
        for rank in ranks:
            of = mine == rank
            amounts = amounts_before(edges, begin[of], end[of], nbytes[of])
            of_ranks[rank][name] = np.diff(amounts) / seconds
    return Bandwidth(seconds, total, of_ranks if len(ranks) <= MOST_RANKS else {})


def _series(trace: Trace, has_bytes: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """Which spans are of which line of the chart."""
    categories, tiers = trace.spans["category"], trace.spans["tier"]
    reads = (categories == Category.read) & has_bytes
    found = {
        "read" if tier is Tier.none else f"read from {tier.name}": reads & (tiers == tier)
        for tier in Tier
    }
    for category in (Category.stage, *MOVING):
        found[category.name] = (categories == category) & has_bytes
    return {name: chosen for name, chosen in found.items() if chosen.any()}


@dataclass(frozen=True, slots=True)
class SideBySide:
    """While so many reads of all ranks went on at once."""

    num_reads: int
    seconds: float
    nbytes: float
    reads_done: float
    """How many reads that time is worth."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def side_by_side(trace: Trace, starts: Times, stops: Times) -> list[SideBySide]:
    """What reads brought, by how many went on at once; small ones tell of latencies alone."""
    nbytes = trace.spans["nbytes"]
    reads = (trace.spans["category"] == Category.read) & (stops > starts) & (nbytes > 0)
    if not reads.any():
        return []
    reads &= nbytes >= np.percentile(nbytes[reads], 75) * LEAST_SIZE
    begin, end = starts[reads], stops[reads]
    ends = np.concatenate((begin, end))
    order = np.argsort(ends, kind="stable")
    lasting = np.diff(ends[order])
    steps = np.repeat(np.array([1, -1], np.int64), len(begin))[order]
    at_once = np.minimum(np.cumsum(steps)[:-1], MOST_LEVELS)

    def sums(rates: NDArray[np.float64]) -> NDArray[np.float64]:
        level = np.cumsum(np.concatenate((rates, -rates))[order])[:-1]
        found: NDArray[np.float64] = np.bincount(at_once, weights=lasting * np.maximum(level, 0))
        return found

    seconds = np.bincount(at_once, weights=lasting) / 1e9
    brought, done = sums(nbytes[reads] / (end - begin)), sums(1.0 / (end - begin))
    return [
        SideBySide(int(num), float(seconds[num]), float(brought[num]), float(done[num]))
        for num in np.flatnonzero(seconds)
        if num > 0
    ]
