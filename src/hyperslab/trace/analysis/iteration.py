"""One iteration of training on all ranks: what ran when, and what was hidden behind what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hyperslab.trace.analysis.attribution import Attribution
from hyperslab.trace.analysis.intervals import Intervals
from hyperslab.trace.analysis.loop import Rank, Step
from hyperslab.trace.span import Category

ROWS = (
    Category.compute,
    Category.halo,
    Category.all_reduce,
    Category.copy,
    Category.optimizer,
    Category.exchange,
    Category.read,
    Category.decode,
    Category.wait,
)
ALWAYS = (Category.compute, Category.halo, Category.all_reduce)
MOST_PIECES = 400
"""Of a row without names."""
MOST_NAMED, LEAST_NAMED, ALL_NAMED = 1500, 40, 100_000
"""Spans of a row whose names are kept: of all rows so many together."""


class Piece(NamedTuple):
    """A span, in seconds from the start of the iteration."""

    start: float
    seconds: float
    name: str = ""


@dataclass(frozen=True)
class Row:
    """A category of a rank; on its GPU where the GPU's times are known."""

    category: Category
    pieces: list[Piece]
    seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float:
        return 1.0 - self.exposed_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class RankRows:
    rank: int
    on_device: bool
    start: float
    """Against that of the first rank."""
    seconds: float
    rows: list[Row]


@dataclass(frozen=True)
class Iteration:
    epoch: int
    number: int
    start: int
    stop: int
    most_named: int = MOST_NAMED
    ranks: list[RankRows] = field(default_factory=list)


def choose_iteration(rank: Rank, num_ranks: int) -> Iteration | None:
    """The step whose length is in the middle, in the last epoch with several.

    Neither the first of an epoch, in which a loader starts, nor one that evaluates or saves.
    """
    steps = rank.steps
    if not rank.has_steps or not steps:
        return None
    counts = {step.epoch: 0 for step in steps}
    for step in steps:
        counts[step.epoch] += 1
    usual = [number for number, count in counts.items() if count > 2] or [*counts]
    among = [step for step in steps if step.epoch == usual[-1]]
    among = [step for step in among[1:] if not _is_special(rank, step)] or among[1:] or among
    among.sort(key=lambda each: each.stop - each.start)
    chosen = among[len(among) // 2]
    most = max(LEAST_NAMED, min(MOST_NAMED, ALL_NAMED // (len(ROWS) * num_ranks)))
    return Iteration(chosen.epoch, chosen.number, chosen.start, chosen.stop, most)


def _is_special(rank: Rank, step: Step) -> bool:
    """Whether the loop evaluates or saves in it; a checkpoint may be written beside it."""
    by_loop = np.isin(rank.categories, (Category.evaluation, Category.checkpoint)) & rank.on_loop
    return bool(np.any(by_loop & (rank.starts < step.stop) & (rank.stops > step.start)))


def rows_of(rank: Rank, attribution: Attribution, iteration: Iteration) -> RankRows:
    """What ``rank`` did in its step of the same number."""
    found = [
        step
        for step in rank.steps
        if (step.epoch, step.number) == (iteration.epoch, iteration.number)
    ]
    start, stop = (found[0].start, found[0].stop) if found else (iteration.start, iteration.stop)
    rows = []
    for category in ROWS:
        busy = attribution.busy.get(category, Intervals()).clipped(start, stop)
        if not len(busy) and category not in ALWAYS:
            continue
        given = attribution.exposed.get(category, Intervals()).clipped(start, stop)
        pieces = _pieces(rank, category, busy, iteration, (start, stop))
        rows.append(Row(category, pieces, busy.total / 1e9, given.total / 1e9))
    return RankRows(
        rank=rank.rank,
        on_device=bool(rank.on_device.any()),
        start=(start - iteration.start) / 1e9,
        seconds=(stop - start) / 1e9,
        rows=rows,
    )


def _pieces(
    rank: Rank,
    category: Category,
    busy: Intervals,
    iteration: Iteration,
    window: tuple[int, int],
) -> list[Piece]:
    """Spans with their names where these are few and apart, else what they cover."""
    start, stop = window
    origin, most = iteration.start, iteration.most_named
    among = rank.categories == category
    on_device = among & rank.on_device
    chosen = on_device if on_device.any() else among
    where = np.flatnonzero(chosen & (rank.starts < stop) & (rank.stops > start))
    if 0 < len(where) <= most:
        return [
            Piece((begin - origin) / 1e9, (end - begin) / 1e9, _name_of(rank, i))
            for i in where.tolist()
            for begin, end in _parts(rank, i, busy)
        ]
    few = busy.coarse(min(MOST_PIECES, most))
    return [
        Piece((begin - origin) / 1e9, (end - begin) / 1e9)
        for begin, end in zip(few.starts.tolist(), few.stops.tolist(), strict=True)
    ]


def _parts(rank: Rank, span: int, busy: Intervals) -> Iterator[tuple[int, int]]:
    """A pass without the waiting in it, for one."""
    found = busy.clipped(int(rank.starts[span]), int(rank.stops[span]))
    return zip(found.starts.tolist(), found.stops.tolist(), strict=True)


def _name_of(rank: Rank, span: int) -> str:
    strings, of = rank.trace.strings, rank.spans[span]
    return " ".join(filter(None, (strings[of["name"]], strings[of["layer"]])))
