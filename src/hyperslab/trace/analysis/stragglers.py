"""Ranks that the others wait for."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

from hyperslab.trace.analysis.analysis import Analysis
from hyperslab.trace.analysis.periods import Share
from hyperslab.trace.analysis.rank_report import RankReport
from hyperslab.trace.span import Category

MESSAGES = (Category.halo, Category.all_reduce)
LEAST_LAG = 0.03
"""Of wall time: ranks that are later by less are as fast as the others."""


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
    """The latest first; of many that are late none is, as then the others are fast."""
    ranks = analysis.ranks
    found = [each for rank in ranks if (each := _as_straggler(rank, ranks)) is not None]
    if len(found) > len(ranks) / 2:
        return []
    return sorted(found, key=lambda each: -each.lag_seconds)


def _own(rank: RankReport, epoch: int | None = None) -> float:
    """Seconds in which it did not wait for other ranks."""
    period = rank.total if epoch is None else rank.epochs.get(epoch)
    return period.seconds - period.exposed(*MESSAGES) if period else 0.0


def _as_straggler(rank: RankReport, ranks: list[RankReport]) -> Straggler | None:
    others = [each for each in ranks if each is not rank]
    if not others:
        return None
    lag = _own(rank) - median(map(_own, others))
    if lag < LEAST_LAG * rank.total.seconds or lag <= 0:
        return None
    category, excess = Category.other, -1.0
    for each, share in rank.total.categories.items():
        more = share.exposed_seconds - _usual(each, others)
        if each not in MESSAGES and more > excess:
            category, excess = each, more
    late = [
        epoch
        for epoch, period in rank.epochs.items()
        if _own(rank, epoch) - median(_own(each, epoch) for each in others)
        > LEAST_LAG * period.seconds
    ]
    waits = mean(each.total.exposed(*MESSAGES) for each in others)
    return Straggler(
        rank=rank.rank,
        host=rank.processes[0].host if rank.processes else "",
        lag_seconds=lag,
        others_wait_seconds=waits - rank.total.exposed(*MESSAGES),
        category=category,
        seconds=rank.total.categories.get(category, Share()).exposed_seconds,
        usual_seconds=_usual(category, others),
        epochs=late,
    )


def _usual(category: Category, ranks: list[RankReport]) -> float:
    return median(rank.total.exposed(category) for rank in ranks)
