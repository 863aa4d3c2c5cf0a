"""Seconds and bytes of categories, in an epoch or in several, of one rank or of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hyperslab.trace.analysis.loop import READERS
from hyperslab.trace.span import Category

IO = (*READERS, Category.wait)
"""What a loop that waits for samples waits for."""


@dataclass(frozen=True, slots=True)
class Share:
    """The time of a category, and its bytes."""

    seconds: float = 0.0
    """In which it went on; several threads at once count once."""
    exposed_seconds: float = 0.0
    """Of these, in which the loop waited for it, or did it itself."""
    thread_seconds: float = 0.0
    """Of all threads, added up."""
    nbytes: float = 0

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)

    def __add__(self, other: Share) -> Share:
        return Share(
            self.seconds + other.seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.thread_seconds + other.thread_seconds,
            self.nbytes + other.nbytes,
        )


@dataclass(frozen=True)
class Period:
    """An epoch, or more, of one rank or of several."""

    seconds: float = 0.0
    """Of wall time; the categories' exposed times add up to it."""
    categories: dict[Category, Share] = field(default_factory=dict)

    def exposed(self, *categories: Category) -> float:
        """Seconds."""
        return sum(self.categories.get(each, Share()).exposed_seconds for each in categories)

    def share(self, *categories: Category) -> float:
        return self.exposed(*categories) / self.seconds if self.seconds else 0.0

    def divided(self, num: int, *, sums: bool = True) -> Period:
        """All of it divided by ``num``; without ``sums`` not the bytes, nor seconds of threads."""
        of_sums = num if sums else 1
        return Period(
            self.seconds / num,
            {
                category: Share(
                    share.seconds / num,
                    share.exposed_seconds / num,
                    share.thread_seconds / of_sums,
                    share.nbytes / of_sums,
                )
                for category, share in self.categories.items()
            },
        )


def mean_of_ranks(periods: Sequence[Period]) -> Period:
    """Means of seconds, sums of bytes and of seconds of threads."""
    return add_periods(periods).divided(max(1, len(periods)), sums=False)


def mean_of_epochs(periods: Sequence[Period]) -> Period:
    """Means of all."""
    return add_periods(periods).divided(max(1, len(periods)))


def add_periods(periods: Iterable[Period]) -> Period:
    """One after another."""
    seconds, categories = 0.0, dict[Category, Share]()
    for period in periods:
        seconds += period.seconds
        for category, share in period.categories.items():
            categories[category] = categories.get(category, Share()) + share
    return Period(seconds, dict(sorted(categories.items())))
