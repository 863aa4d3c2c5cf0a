"""The numbers of a run as the page's script reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.iteration import Iteration
from hyperslab.trace.analysis.lanes import Lane
from hyperslab.trace.analysis.periods import Period
from hyperslab.trace.analysis.rank_report import RankReport

if TYPE_CHECKING:
    from hyperslab.trace.analysis.report import Report

TICKS = 10**8
"""Into which the time of a run is divided; a picture needs no more."""
MOST_RANKS_OF_ITERATION = 64
MOST_EPOCHS_OF_RANKS = 4000
"""Of all ranks together; means over ranks are there of all epochs."""
MOST_MARKS = 500


def run_content(report: Report) -> dict[str, Any]:
    analysis = report.analysis
    whole = max(1, analysis.stop - analysis.start)
    tick = max(1, whole // TICKS)
    marks = sorted(
        {
            (step.start - analysis.start) / 1e9
            for rank in analysis.ranks[:1]
            for step in rank.step_list
            if step.number == 0
        }
    )
    return {
        "name": report.name,
        "seconds": whole / 1e9,
        "unit_seconds": tick / 1e9,
        "marks": marks[:MOST_MARKS],
        "mean": {
            "epochs": _epochs(analysis.epochs),
            "outside": _period(analysis.outside),
            "total": _period(analysis.total),
        },
        "ranks": [
            _rank(rank, analysis.start, tick, epochs_of_ranks(report)) for rank in analysis.ranks
        ],
        "bandwidth": {
            "total": _series(analysis.bandwidth.total),
            "ranks": {
                str(rank): _series(series) for rank, series in analysis.bandwidth.of_ranks.items()
            },
        },
        "iteration": _iteration(analysis.iteration) if analysis.iteration else None,
    }


def epochs_of_ranks(report: Report) -> int:
    """How many epochs are told of each rank."""
    return max(1, MOST_EPOCHS_OF_RANKS // max(1, report.num_ranks))


def _rank(rank: RankReport, start: int, tick: int, num_epochs: int) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.processes[0].host if rank.processes else "",
        "epochs": _epochs(dict([*rank.epochs.items()][:num_epochs])),
        "outside": _period(rank.outside),
        "total": _period(rank.total),
        "exposed": {c.name: _lane(lane, start, tick) for c, lane in rank.exposed.items()},
        "busy": {
            category.name: _lane(lane, start, tick)
            for category, lane in rank.busy.items()
            if category.name not in ("step", "epoch", "other")
        },
        "threads": [
            {
                "name": thread.name,
                "seconds": {c.name: _digits(each) for c, each in thread.seconds.items()},
            }
            for thread in rank.threads
        ],
    }


def _epochs(epochs: dict[int, Period]) -> list[dict[str, Any]]:
    return [{"epoch": number} | _period(period) for number, period in epochs.items()]


def _period(period: Period) -> dict[str, Any]:
    """Of each category its seconds, the exposed ones, those of threads, and bytes."""
    return {
        "seconds": _digits(period.seconds),
        "categories": {
            category.name: [
                _digits(share.seconds),
                _digits(share.exposed_seconds),
                _digits(share.thread_seconds),
                int(share.nbytes),
            ]
            for category, share in period.categories.items()
        },
    }


def _digits(value: float) -> float:
    return float(f"{value:.7g}")


def _lane(lane: Lane, start: int, tick: int) -> dict[str, list[int]]:
    """Gaps and lengths in turn, or the filled share of columns in percent."""
    if lane.intervals is None:
        return {"filled": np.rint(lane.filled * 100).astype(int).tolist()}
    ends = np.empty(2 * len(lane.intervals), np.int64)
    ends[0::2] = (lane.intervals.starts - start) // tick
    ends[1::2] = -(-(lane.intervals.stops - start) // tick)
    return {"intervals": np.diff(ends, prepend=0).tolist()}


def _series(series: dict[str, NDArray[np.float64]]) -> dict[str, list[int]]:
    return {name: np.rint(values).astype(np.int64).tolist() for name, values in series.items()}


def _iteration(iteration: Iteration) -> dict[str, Any]:
    ranks = iteration.ranks[:MOST_RANKS_OF_ITERATION]
    first = min(0.0, *(each.start for each in ranks))
    last = max(each.start + each.seconds for each in ranks)
    return {
        "seconds": last - first,
        "ranks": [
            {
                "rank": each.rank,
                "on_device": each.on_device,
                "seconds": each.seconds,
                "rows": [
                    {
                        "name": row.category.name,
                        "seconds": _digits(row.seconds),
                        "exposed": _digits(row.exposed_seconds),
                        "pieces": [
                            [_digits(piece.start - first), _digits(piece.seconds), piece.name]
                            for piece in row.pieces
                        ],
                    }
                    for row in each.rows
                ],
            }
            for each in ranks
        ],
    }
