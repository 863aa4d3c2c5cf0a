"""Several runs side by side: ranks, shuffling, and the I/O that was waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hyperslab.pages import shown_seconds, shown_share
from hyperslab.partial import shown_nbytes
from hyperslab.trace.analysis.loop import READERS
from hyperslab.trace.analysis.periods import IO, Period, mean_of_epochs

if TYPE_CHECKING:
    from hyperslab.trace.analysis.report import Report

RUN_COLUMNS = (
    *("run", "shuffle", "ranks", "first epoch", "waited", "later epochs", "waited", "I/O", "rate"),
)
"""After each time of an epoch the share of it that was waited for samples; I/O of later ones."""


def first_and_later(report: Report) -> tuple[Period, Period]:
    """The first epoch, and the mean of those after it; a single one is both."""
    epochs = [*report.analysis.epochs.values()]
    if not epochs:
        return Period(), Period()
    return epochs[0], mean_of_epochs(epochs[1:] or epochs)


def io_seconds(period: Period) -> float:
    """In which samples were read, decoded, staged, fetched: the sum of these."""
    return sum(
        share.seconds for category, share in period.categories.items() if category in READERS
    )


def run_row(report: Report) -> list[str]:
    first, later = first_and_later(report)
    seconds = io_seconds(later)
    nbytes = sum(later.categories[each].nbytes for each in READERS if each in later.categories)
    times = [(shown_seconds(each.seconds), shown_share(each.share(*IO))) for each in (first, later)]
    rate = f"{shown_nbytes(nbytes / seconds)}/s" if nbytes and seconds else "-"
    return [
        report.name,
        report.shuffle,
        str(report.num_ranks),
        *times[0],
        *times[1],
        shown_seconds(seconds),
        rate,
    ]


def lines_of_runs(reports: Sequence[Report]) -> dict[str, list[tuple[int, float]]]:
    """By shuffling, the share of I/O that was waited for, by ranks; means of runs that are alike.

    Empty where all runs have equally many ranks.
    """
    shares: dict[str, dict[int, list[float]]] = {}
    for report in reports:
        name = "all" if report.shuffle == "-" else f"shuffle: {report.shuffle}"
        share = report.analysis.total.share(*IO)
        shares.setdefault(name, {}).setdefault(report.num_ranks, []).append(share)
    if len({report.num_ranks for report in reports}) < 2:
        return {}
    return {
        name: [(num, sum(each) / len(each)) for num, each in sorted(of.items())]
        for name, of in shares.items()
    }


def runs_verdict(reports: Sequence[Report]) -> str:
    """What shuffling and more ranks change, in words."""
    return " ".join((*_about_shuffles(reports), *_about_ranks(reports)))


def _about_shuffles(reports: Sequence[Report]) -> Iterable[str]:
    """Global against local, among runs of equally many ranks."""
    for num in sorted({report.num_ranks for report in reports}):
        by = {
            shuffle: [each for each in reports if each.num_ranks == num and each.shuffle == shuffle]
            for shuffle in ("local", "global")
        }
        if not all(by.values()):
            continue
        later = {
            name: mean_of_epochs([first_and_later(e)[1] for e in of]) for name, of in by.items()
        }
        local, everywhere = later["local"], later["global"]
        yield (
            f"On {num} rank{'s' * (num > 1)} later epochs take {shown_seconds(local.seconds)} with "
            f"local and {shown_seconds(everywhere.seconds)} with global shuffling; I/O takes "
            f"{shown_seconds(io_seconds(local))} and {shown_seconds(io_seconds(everywhere))}, and "
            f"samples are waited for {shown_seconds(local.exposed(*IO))} and "
            f"{shown_seconds(everywhere.exposed(*IO))}."
        )


def _about_ranks(reports: Sequence[Report]) -> Iterable[str]:
    for name, points in lines_of_runs(reports).items():
        if len(points) < 2:
            continue
        told = ", ".join(
            f"{shown_share(share)} on {num} rank{'s' * (num > 1)}" for num, share in points
        )
        which = "" if name == "all" else f" ({name})"
        yield f"I/O that is waited for{which}: {told}."
