"""How many bytes a second came from where, and how that grew with reads side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.intervals import Times, amounts_before, grouped
from hyperslab.trace.span import Category, Flag, Tier, Trace

NUM_BINS = 200
MOST_RANKS = 32
"""Whose bandwidths are told one by one."""
MOST_LEVELS = 64
MOVING = (Category.exchange, Category.copy, Category.halo, Category.all_reduce)
WAITING = "wait for "
"""How the names of spans begin in which messages are waited for."""


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
    begun, ended = int(starts.min()), int(stops.max())
    # Floats hold nanoseconds of differences, not of times.
    edges = begun + np.linspace(0, ended - begun, NUM_BINS + 1).astype(np.int64)
    seconds = float(edges[-1] - edges[0]) / NUM_BINS / 1e9 or 1e-9
    rank_of = np.array([process.rank for process in trace.processes] or [0], np.int64)
    ranks = sorted(set(rank_of.tolist()))
    are_told = 1 < len(ranks) <= MOST_RANKS
    counted = counted_nbytes(trace.spans, trace.strings)
    has_bytes = counted > 0
    total: dict[str, NDArray[np.float64]] = {}
    of_ranks: dict[int, dict[str, NDArray[np.float64]]] = {rank: {} for rank in ranks}
    for name, chosen in _series(trace, has_bytes).items():
        nbytes = counted[chosen]
        begin, end = starts[chosen], stops[chosen]
        total[name] = np.diff(amounts_before(edges, begin, end, nbytes)) / seconds
        if not are_told:
            continue
        mine = rank_of[trace.spans["process"][chosen]]
        for rank in ranks:
            of = mine == rank
            amounts = amounts_before(edges, begin[of], end[of], nbytes[of])
            of_ranks[rank][name] = np.diff(amounts) / seconds
    return Bandwidth(seconds, total, of_ranks if are_told else {})


def counted_nbytes(spans: NDArray[Any], strings: Sequence[str]) -> NDArray[np.int64]:
    """The bytes of spans, each counted once.

    Messages on their way and the waiting for them tell of the same bytes, and so do a GPU and its
    host: those of waiting, and where both tell of a category those of the host, are left out.
    """
    nbytes: NDArray[np.int64] = spans["nbytes"].copy()
    waits = [number for number, name in enumerate(strings) if name.startswith(WAITING)]
    if waits:
        nbytes[np.isin(spans["name"], waits) & ((spans["flags"] & Flag.exposed) != 0)] = 0
    on_device = (spans["flags"] & Flag.device) != 0
    if on_device.any():
        for category in MOVING:
            of = spans["category"] == category
            if (nbytes[of & on_device] > 0).any():
                nbytes[of & ~on_device] = 0
    return nbytes


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
    """Reads during which so many of all ranks went on, on average."""

    num_reads: int
    count: int
    seconds: float
    """Of threads."""
    rate: float
    """Bytes a second that so many bring: so many times what one of them does, typically."""


def side_by_side(trace: Trace, starts: Times, stops: Times) -> list[SideBySide]:
    """What reads bring, by how many go on at once."""
    reads = (trace.spans["category"] == Category.read) & (stops > starts)
    reads &= trace.spans["nbytes"] > 0
    if not reads.any():
        return []
    begin, end, nbytes = starts[reads], stops[reads], trace.spans["nbytes"][reads]
    lasting = end - begin
    going_on = [amounts_before(times, begin, end, lasting) for times in (begin, end)]
    at_once = np.clip(np.rint((going_on[1] - going_on[0]) / lasting), 1, MOST_LEVELS).astype(int)
    return [
        SideBySide(
            num,
            len(of),
            float(lasting[of].sum()) / 1e9,
            num * _median(nbytes[of] / lasting[of] * 1e9, lasting[of]),
        )
        for num, of in grouped(at_once)
    ]


def _median(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float:
    """Half of the weights lie below it: a few values that are far off do not count for more."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
