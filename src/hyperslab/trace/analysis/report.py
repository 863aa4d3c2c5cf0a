"""The report of a trace: from the files of a run to words, tables, JSON and a page."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from hyperslab.partial import write_file
from hyperslab.trace.analysis.analysis import Analysis, analyse
from hyperslab.trace.analysis.periods import IO, Period
from hyperslab.trace.analysis.rank_report import RankReport
from hyperslab.trace.analysis.replay import WhatIf, what_ifs
from hyperslab.trace.analysis.runs import first_and_later
from hyperslab.trace.analysis.stragglers import Straggler, find_stragglers
from hyperslab.trace.analysis.verdict import Finding, find, verdict
from hyperslab.trace.merge import load_trace
from hyperslab.trace.span import Trace

StrPath = str | os.PathLike[str]
UNKNOWN = "-"


class Report:
    """What a run waited for."""

    def __init__(self, analysis: Analysis, name: str, shuffle: str = UNKNOWN) -> None:
        self.analysis, self.name = analysis, name
        self.shuffle = shuffle
        """How its samples were shuffled, where the run's folder tells that."""

    @property
    def verdict(self) -> str:
        """What it waited for and what would help, in a few sentences."""
        return verdict(self.findings)

    @cached_property
    def findings(self) -> list[Finding]:
        return find(self.analysis, self.what_ifs, self.stragglers)

    @cached_property
    def what_ifs(self) -> list[WhatIf]:
        return what_ifs(self.analysis)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        return find_stragglers(self.analysis)

    @property
    def num_ranks(self) -> int:
        return len(self.analysis.ranks)

    def shares(self, epoch: int | None = None) -> dict[str, float]:
        """What each category was given of the wall time of an epoch, or of all; the sum is 1."""
        period = self.analysis.total if epoch is None else self.analysis.epochs[epoch]
        return {category.name: period.share(category) for category in period.categories}

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for ``--json``; seconds are means over ranks, bytes sums."""
        analysis = self.analysis
        first, later = first_and_later(self)
        return {
            "name": self.name,
            "verdict": self.verdict,
            "findings": [asdict(each) for each in self.findings],
            "num_ranks": self.num_ranks,
            "num_spans": analysis.num_spans,
            "shuffle": self.shuffle,
            "seconds": (analysis.stop - analysis.start) / 1e9,
            "epochs": [
                {"epoch": number} | period_dict(period)
                for number, period in analysis.epochs.items()
            ],
            "first_epoch": period_dict(first),
            "later_epochs": period_dict(later),
            "total": period_dict(analysis.total),
            "outside_epochs": period_dict(analysis.outside),
            "what_if": [asdict(each) | {"saved_share": each.saved_share} for each in self.what_ifs],
            "stragglers": [
                asdict(each) | {"category": each.category.name} for each in self.stragglers
            ],
            "slowest_files": [
                asdict(each) | {"bytes_per_second": each.rate} for each in analysis.files
            ],
            "reads_at_once": [asdict(each) for each in analysis.reading],
            "bandwidth": {
                "bin_seconds": analysis.bandwidth.seconds,
                "bytes_per_second": {
                    name: [round(each) for each in values]
                    for name, values in analysis.bandwidth.total.items()
                },
            },
            "iteration": self._iteration(),
            "ranks": [_rank_dict(rank) for rank in analysis.ranks],
            "notes": analysis.notes,
        }

    def _iteration(self) -> dict[str, Any] | None:
        iteration = self.analysis.iteration
        if iteration is None:
            return None
        return {
            "epoch": iteration.epoch,
            "step": iteration.number,
            "ranks": [
                {
                    "rank": each.rank,
                    "seconds": each.seconds,
                    "rows": {
                        row.category.name: {
                            "seconds": row.seconds,
                            "exposed_seconds": row.exposed_seconds,
                            "hidden_share": row.hidden_share,
                        }
                        for row in each.rows
                    },
                }
                for each in iteration.ranks
            ],
        }

    def to_html(self) -> str:
        """One page that needs nothing but itself."""
        from hyperslab.trace.analysis.page import to_html

        return to_html([self])


def period_dict(period: Period) -> dict[str, Any]:
    return {
        "seconds": period.seconds,
        "io_exposed_seconds": period.exposed(*IO),
        "io_exposed_share": period.share(*IO),
        "categories": {
            category.name: {
                "seconds": share.seconds,
                "exposed_seconds": share.exposed_seconds,
                "hidden_seconds": share.hidden_seconds,
                "exposed_share": period.share(category),
                "thread_seconds": share.thread_seconds,
                "bytes": int(share.nbytes),
            }
            for category, share in period.categories.items()
        },
    }


def _rank_dict(rank: RankReport) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.processes[0].node if rank.processes else 0,
        "host": rank.processes[0].host if rank.processes else "",
        "pids": [each.pid for each in rank.processes],
        "num_readers": rank.num_readers,
        "has_gpu_times": rank.has_device_times,
        "epochs": [
            {"epoch": number} | period_dict(period) for number, period in rank.epochs.items()
        ],
        "outside_epochs": period_dict(rank.outside),
        "threads": [
            {
                "name": thread.name,
                "pid": thread.pid,
                "is_gpu": thread.is_device,
                "seconds": {category.name: each for category, each in thread.seconds.items()},
            }
            for thread in rank.threads
        ],
        **period_dict(rank.total),
    }


def report(run: StrPath | list[StrPath] | Trace, name: str | None = None) -> Report:
    """The report of a run folder, of a folder of trace files, of files, or of a trace.

    >>> from hyperslab.trace.span import empty_spans
    >>> report(Trace(empty_spans(0))).verdict
    'Nothing was recorded.'
    """
    if isinstance(run, Trace):
        return Report(analyse(run), name or "trace")
    paths = [Path(each) for each in run] if isinstance(run, list) else [Path(run)]
    return Report(analyse(load_trace(paths)), name or _name_of(paths[0]), _shuffle_of(paths[0]))


def write_report(run_folder: StrPath) -> Report:
    """Writes ``trace.html`` and ``trace.json`` into the folder of a run, each as a whole."""
    found = report(run_folder)
    folder = Path(run_folder)
    write_file(folder / "trace.json", to_json(found.to_dict()))
    write_file(folder / "trace.html", found.to_html())
    return found


def to_json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def _name_of(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.name == "trace" else path.stem if path.is_file() else path.name


def _shuffle_of(path: Path) -> str:
    """From the settings of a run of ``hyperslab train``."""
    for folder in (path, *path.resolve().parents[:2]):
        config = folder / "config.toml"
        if config.is_file():
            try:
                told = tomllib.loads(config.read_text()).get("data", {})
            except (OSError, ValueError):
                return UNKNOWN
            return str(told.get("shuffle", "global")) if isinstance(told, dict) else UNKNOWN
    return UNKNOWN
