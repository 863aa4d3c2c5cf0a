"""From the files of all processes to one trace, on one clock."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.trace.file import SUFFIX, FileContent, printable
from hyperslab.trace.foreign.identify import read_contents
from hyperslab.trace.foreign.lives import add_lives
from hyperslab.trace.foreign.posix_file import mark_main_loops
from hyperslab.trace.span import Process, Thread, Trace, empty_spans

FOLDER = "trace"
"""Of a run, for its trace files."""


def load_trace(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Trace:
    """One trace from a run folder, a folder of trace files, a file, or several of them.

    Files of PyTorch's profiler, Darshan's parsers, dftracer and tables of spans are read too.

    Starts are nanoseconds of Unix time by the clock of the lowest rank. Damaged files are read as
    far as they are whole, and ``notes`` tell what was left out; only where there is nothing to look
    at it raises ``FormatError``.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return merge_traces(read_files(find_contents([Path(path) for path in given])))


def find_contents(paths: Sequence[Path]) -> list[FileContent]:
    """What ``paths`` hold, as far as it is whole; a content for each process."""
    files = [file for path in paths for file in find_trace_files(path)]
    contents = [content for file in files for content in read_contents(file)]
    mark_main_loops(contents)
    return add_lives(contents)


def find_trace_files(path: Path) -> list[Path]:
    """The trace files of a run folder or of a folder of them; a file stands for itself."""
    try:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise FormatError(f"{path} does not exist: give a run folder or trace files")
        folders = [each for each in (path, path / FOLDER) if each.is_dir()]
        found = sorted(
            file for folder in folders for file in folder.iterdir() if file.name.endswith(SUFFIX)
        )
    except OSError as error:
        where = error.filename or path
        raise FormatError(f"{where} cannot be read: {error.strerror or error}") from error
    if not found:
        raise FormatError(
            f"{path} has no trace files (*{SUFFIX}), nor has {path / FOLDER}: was the run traced?"
        )
    return found


def read_files(contents: Sequence[FileContent]) -> list[Trace]:
    """A trace of each file, all on the clock of the lowest rank; the blocks are taken over."""
    contents = sorted(contents, key=lambda each: (_rank(each), each.path.name))
    clocks = _Clocks(contents)
    hosts: dict[str, int] = {}
    traces = []
    for content in contents:
        facts, notes = content.facts, [printable(note) for note in content.notes]
        if not facts and not content.blocks:
            traces.append(Trace(empty_spans(0), notes=notes))
            continue
        host = printable(str(facts.get("host", "")))
        process = Process(
            rank=_rank(content),
            node=hosts.setdefault(host, len(hosts)),
            pid=_number(content, "pid"),
            host=host,
            program=printable(str(facts.get("program", ""))),
        )
        spans = np.concatenate(content.blocks) if content.blocks else empty_spans(0)
        content.blocks.clear()
        clocks.align(spans, content)
        spans["process"] = 0
        strings = [printable(each) for each in content.strings]
        threads = [replace(each, name=printable(each.name)) for each in content.threads]
        traces.append(Trace(spans, strings, [process], threads or [Thread()], notes))
    if clocks.notes:
        traces.append(Trace(empty_spans(0), notes=clocks.notes))
    return traces


def merge_traces(traces: Iterable[Trace]) -> Trace:
    """The spans of all traces, by start; each must be on the same clock."""
    traces = list(traces)
    merged = Trace(np.empty(sum(map(len, traces)), traces[0].spans.dtype) if traces else _NONE)
    numbers = {"": 0}
    at = 0
    for trace in traces:
        spans = merged.spans[at : at + len(trace)]
        spans[:] = trace.spans
        at += len(trace)
        known = [numbers.setdefault(each, len(numbers)) for each in trace.strings]
        if known != list(range(len(known))):
            renumbered = np.array(known, np.uint32)
            spans["name"] = renumbered[spans["name"]]
            spans["layer"] = renumbered[spans["layer"]]
        spans["thread"] += len(merged.threads)
        spans["process"] += len(merged.processes)
        merged.threads.extend(
            replace(each, process=each.process + len(merged.processes)) for each in trace.threads
        )
        merged.processes.extend(trace.processes)
        merged.notes.extend(trace.notes)
    merged.strings[:] = numbers
    starts = np.ascontiguousarray(merged.spans["start"])
    if np.any(starts[1:] < starts[:-1]):
        order = np.argsort(starts, kind="stable")
        return replace(merged, spans=merged.spans[order])
    return merged


_NONE = empty_spans(0)


def _rank(content: FileContent) -> int:
    return _number(content, "rank")


def _number(content: FileContent, fact: str) -> int:
    told = content.facts.get(fact, 0)
    return told if isinstance(told, int) and 0 <= told < 1 << 62 else 0


class _Clocks:
    """The clocks of all processes; those of one host share one, which counts from its start.

    Files tell pairs of it and of Unix time, and pairs of it and of what it was behind rank 0's.
    """

    def __init__(self, contents: Sequence[FileContent]) -> None:
        self.notes: list[str] = []
        self._pairs: dict[str, list[tuple[int, int]]] = {}
        self._offsets: dict[str, list[tuple[int, int]]] = {}
        self._hosts: dict[str, str] = {}
        for content in contents:
            clock = _clock(content)
            self._hosts.setdefault(clock, str(content.facts.get("host") or content.path.name))
            self._pairs.setdefault(clock, []).extend(_number_pairs(content, "clocks"))
            self._offsets.setdefault(clock, []).extend(_number_pairs(content, "offsets"))
        self._first = next(iter(self._pairs), "")
        for clock, pairs in self._pairs.items():
            if clock != self._first and not self._offsets[clock]:
                how = (
                    "aligned by the hosts' own clocks alone, which may be milliseconds apart"
                    if pairs and self._pairs[self._first]
                    else "left as it is: its file does not tell its time"
                )
                first = self._hosts[self._first]
                self.notes.append(
                    f"the clock of {self._hosts[clock]} was not compared with that of {first} "
                    f"while the run went on: it was {how}"
                )

    def align(self, spans: NDArray[Any], content: FileContent) -> None:
        """Moves the starts of a file's spans to Unix time by the first clock."""
        clock = _clock(content)
        offsets = self._offsets[clock]
        if clock != self._first and offsets:
            told = np.array(sorted(offsets), np.int64)
            at, behind = told[:, 0], told[:, 1]
            # Floats hold nanoseconds of differences, not of times.
            moved = np.interp(spans["start"] - at[0], at - at[0], behind - behind[0])
            spans["start"] += behind[0] + moved.astype(np.int64)
            clock = self._first
        spans["start"] += self._to_unix(clock)

    def _to_unix(self, clock: str) -> int:
        pairs = self._pairs[clock]
        return pairs[0][1] - pairs[0][0] if pairs else 0


def _clock(content: FileContent) -> str:
    return str(content.facts.get("clock", content.path))


def _number_pairs(content: FileContent, name: str) -> list[tuple[int, int]]:
    told = content.facts.get(name, [])
    try:
        return [(int(pair[0]), int(pair[1])) for pair in told]
    except (TypeError, ValueError, IndexError):
        content.notes.append(f"{content.path} tells {name} that cannot be understood")
        return []
