"""Ranks that the others wait for."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from hyperslab.trace.analysis.analysis import Analysis
from hyperslab.trace.analysis.rank_report import RankReport
from hyperslab.trace.span import Category

MESSAGES = (Category.halo, Category.all_reduce)
LEAST_LAG = 0.03
"""Of wall time: ranks that are later by less are as fast as the others."""
LARGE_LAG, SIGMAS = 0.2, 3.0
"""Less than this must be more than chance: by so many deviations of the mean of steps."""


@dataclass(frozen=True, slots=True)
class Straggler:
    rank: int
    host: str
    lag_seconds: float
    """More than the rank in the middle of the others needs for its own part."""
    others_wait_seconds: float
    """More that these wait for messages than the rank does."""
    category: Category
    """What takes it longer, for the most part."""
    seconds: float
    """Of that, exposed."""
    usual_seconds: float
    """The same on the other ranks."""
    epochs: list[int]
    """In which it was late."""


def find_stragglers(analysis: Analysis) -> list[Straggler]:
    """The latest first; of many that are late none is, as then the others are fast.

    The first step counts as a usual one of its rank: what a loader takes to start is no straggling.
    """
    ranks = analysis.ranks
    found = [each for rank in ranks if (each := _as_straggler(rank, ranks)) is not None]
    if len(found) > len(ranks) / 2:
        return []
    return sorted(found, key=lambda each: -each.lag_seconds)


def _start_up(rank: RankReport) -> dict[Category, float]:
    """By how much the very first step is longer than a usual one: the loader starts in it."""
    if not rank.has_steps or len(rank.steps.seconds) < 2:
        return {}
    exposed = rank.steps.exposed.items()
    return {each: max(0.0, float(given[0] - np.median(given[1:]))) for each, given in exposed}


def _exposed(rank: RankReport, category: Category, epoch: int | None = None) -> float:
    """Seconds, of all epochs or of one, but for the start."""
    period = rank.total if epoch is None else rank.epochs.get(epoch)
    if period is None:
        return 0.0
    is_first = epoch is None or epoch == min(rank.epochs)
    return period.exposed(category) - (_start_up(rank).get(category, 0.0) if is_first else 0.0)


def _own(rank: RankReport, epoch: int | None = None) -> float:
    """Seconds in which it did not wait for other ranks."""
    own = (each for each in rank.total.categories if each not in MESSAGES)
    return sum(_exposed(rank, each, epoch) for each in own)


def _messages(rank: RankReport) -> float:
    return sum(_exposed(rank, each) for each in MESSAGES)


def _as_straggler(rank: RankReport, ranks: list[RankReport]) -> Straggler | None:
    others = [each for each in ranks if each is not rank]
    if not others:
        return None
    lag = _own(rank) - median(map(_own, others))
    if lag < LEAST_LAG * rank.total.seconds or lag <= 0:
        return None
    if lag < LARGE_LAG * rank.total.seconds and _may_be_chance(rank, others):
        return None
    category, excess = Category.other, -1.0
    for each in rank.total.categories:
        more = _exposed(rank, each) - _usual(each, others)
        if each not in MESSAGES and more > excess:
            category, excess = each, more
    late = [
        epoch
        for epoch, period in rank.epochs.items()
        if _own(rank, epoch) - median(_own(each, epoch) for each in others)
        > LEAST_LAG * period.seconds
    ]
    waits = mean(map(_messages, others))
    return Straggler(
        rank=rank.rank,
        host=rank.processes[0].host if rank.processes else "",
        lag_seconds=lag,
        others_wait_seconds=waits - _messages(rank),
        category=category,
        seconds=_exposed(rank, category),
        usual_seconds=_usual(category, others),
        epochs=late,
    )


def _may_be_chance(rank: RankReport, others: list[RankReport]) -> bool:
    """Whether its steps are now longer, now shorter than those of the others."""
    own, *theirs = map(_own_of_steps, (rank, *others))
    common = [key for key in own if all(key in each for each in theirs)][1:]
    if not rank.has_steps or len(common) < 3:
        return False
    more = np.array([own[key] - median(each[key] for each in theirs) for key in common])
    return bool(more.mean() < SIGMAS * more.std(ddof=1) / len(more) ** 0.5)


def _own_of_steps(rank: RankReport) -> dict[tuple[int, int], float]:
    steps = rank.steps
    own = steps.seconds - sum(steps.exposed.get(each, 0.0) for each in MESSAGES)
    keys = zip(steps.epoch.tolist(), steps.number.tolist(), strict=True)
    return dict(zip(keys, own.tolist(), strict=True))


def _usual(category: Category, ranks: list[RankReport]) -> float:
    return median(_exposed(rank, category) for rank in ranks)
