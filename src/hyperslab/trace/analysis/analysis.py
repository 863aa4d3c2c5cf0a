"""All numbers of a report, from the spans of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hyperslab.trace.analysis.attribution import attribute
from hyperslab.trace.analysis.bandwidth import Bandwidth, SideBySide, bandwidth_of, side_by_side
from hyperslab.trace.analysis.files import FileTimes, slowest_files
from hyperslab.trace.analysis.iteration import Iteration, choose_iteration, rows_of
from hyperslab.trace.analysis.lanes import columns_of
from hyperslab.trace.analysis.loop import ranks_of
from hyperslab.trace.analysis.periods import IO as IO, Period, mean_of_ranks
from hyperslab.trace.analysis.rank_report import RankReport, report_rank
from hyperslab.trace.span import Category, Trace


@dataclass(frozen=True)
class Analysis:
    """All that is known of a run."""

    ranks: list[RankReport]
    epochs: dict[int, Period]
    """Means over ranks of seconds, sums of bytes."""
    outside: Period
    total: Period
    num_spans: int
    start: int
    stop: int
    bandwidth: Bandwidth
    reading: list[SideBySide]
    files: list[FileTimes]
    iteration: Iteration | None
    notes: list[str]


def analyse(trace: Trace) -> Analysis:
    starts = np.ascontiguousarray(trace.spans["start"])
    stops = starts + np.maximum(trace.spans["duration"], 0)
    begin, end = (int(starts.min()), int(stops.max())) if len(trace) else (0, 0)
    bandwidth = bandwidth_of(trace, starts, stops)
    reading = side_by_side(trace, starts, stops)
    del starts, stops
    ranks, iteration = _ranks(trace, begin, end)
    numbers = sorted({number for rank in ranks for number in rank.epochs})
    return Analysis(
        ranks=ranks,
        epochs={
            n: mean_of_ranks([rank.epochs[n] for rank in ranks if n in rank.epochs])
            for n in numbers
        },
        outside=mean_of_ranks([rank.outside for rank in ranks]),
        total=mean_of_ranks([rank.total for rank in ranks]),
        num_spans=len(trace),
        start=begin,
        stop=end,
        bandwidth=bandwidth,
        reading=reading,
        files=slowest_files(trace),
        iteration=iteration,
        notes=[*trace.notes, *_notes(trace, ranks)],
    )


def _ranks(trace: Trace, begin: int, end: int) -> tuple[list[RankReport], Iteration | None]:
    """Those of all ranks; the spans of one at a time are picked out."""
    num_ranks = len({process.rank for process in trace.processes} or {0})
    columns = columns_of(begin, end, num_ranks)
    reports: list[RankReport] = []
    iteration: Iteration | None = None
    for rank in ranks_of(trace):
        attribution = attribute(rank)
        reports.append(report_rank(rank, attribution, columns))
        iteration = iteration or choose_iteration(rank, num_ranks)
        if iteration is not None:
            iteration.ranks.append(rows_of(rank, attribution, iteration))
    return reports, iteration


def _notes(trace: Trace, ranks: list[RankReport]) -> list[str]:
    notes = []
    if not len(trace):
        notes.append("there are no spans: nothing was recorded")
    elif not np.any(trace.spans["epoch"] >= 0) and not np.any(
        trace.spans["category"] == Category.epoch
    ):
        notes.append("no span tells its epoch: all of it is taken for epoch 0")
    device = [rank.has_device_times for rank in ranks]
    if any(device) and not all(device):
        without = [str(rank.rank) for rank in ranks if not rank.has_device_times]
        notes.append(f"ranks {', '.join(without)} have no times of a GPU, others have")
    counts = {number: 0 for rank in ranks for number in rank.epochs}
    for rank in ranks:
        for number in rank.epochs:
            counts[number] += 1
    notes.extend(
        f"epoch {number} is known of {count} of {len(ranks)} ranks"
        for number, count in counts.items()
        if count < len(ranks)
    )
    return [*notes, *_broken_off(ranks), *_missing(counts)]


def _missing(epochs: Iterable[int]) -> Iterator[str]:
    """A process that is killed loses what it had not written."""
    known = sorted(epochs)
    for before, after in pairwise(known):
        if after == before + 2:
            yield f"nothing is known of epoch {before + 1}"
        elif after > before + 2:
            yield f"nothing is known of epochs {before + 1} to {after - 1}"


def _broken_off(ranks: list[RankReport]) -> Iterator[str]:
    for number in sorted({number for rank in ranks for number in rank.broken_off}):
        steps = [rank.broken_off[number] for rank in ranks if number in rank.broken_off]
        few, many = min(steps), max(steps)
        counted = f"{few} to {many} steps" if few < many else f"{few} step{'s' * (few != 1)}"
        yield (
            f"epoch {number} was broken off after {counted}, or has not ended yet: "
            "these count, and what came once it was resumed"
        )
