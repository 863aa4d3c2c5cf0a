"""Tables of spans with a heading: those of ``hyperslab trace export``, and what time loggers write.

Columns may have other names and units, which ``COLUMNS`` and ``UNITS`` list.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from itertools import count
from math import isfinite
from typing import Any

from hyperslab.errors import FormatError
from hyperslab.trace.file import FileContent
from hyperslab.trace.foreign.spans import MOST_RANKS, ImportedProcess, nanoseconds
from hyperslab.trace.foreign.texts import TextFile
from hyperslab.trace.span import Category, Flag, Tier

COLUMNS: dict[str, tuple[str, ...]] = {
    "rank": ("rank", "mpi_rank", "global_rank"),
    "process": ("process", "proc", "pid", "process_id", "worker"),
    "node": ("node", "host", "hostname", "node_name"),
    "thread": ("thread", "tid", "thread_id"),
    "thread_name": ("thread_name",),
    "epoch": ("epoch",),
    "step": ("step", "iteration", "iter", "batch"),
    "category": ("category", "cat", "kind", "type", "event", "operation", "op", "phase"),
    "name": ("name", "file", "filename", "file_name", "path", "label"),
    "start": ("start", "start_time", "begin", "begin_time", "timestamp", "ts"),
    "stop": ("stop", "end", "stop_time", "end_time", "finish"),
    "duration": ("duration", "dur", "elapsed", "elapsed_time"),
    "bytes": ("bytes", "nbytes", "num_bytes", "size"),
    "tier": ("tier",),
    "sample": ("sample",),
    "layer": ("layer",),
    "flags": ("flags",),
}
"""What a column is called."""

UNITS = {
    "s": 1_000_000_000,
    "sec": 1_000_000_000,
    "seconds": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}
"""What the name of a column of times may end with, as in ``start_ms`` or ``start (ms)``."""

_WORDS = {
    Category.read: ("io", "i/o", "reading", "load", "file", "fread", "pread", "open"),
    Category.decode: ("decompress", "decoding"),
    Category.exchange: ("shuffle", "fetch"),
    Category.wait: ("waiting", "idle", "stall", "wait_batch"),
    Category.copy: ("h2d", "to_device", "transfer", "htod"),
    Category.compute: ("train", "training", "forward", "backward", "fwd", "bwd"),
    Category.all_reduce: ("allreduce", "all-reduce", "comm", "communication", "gradients"),
    Category.checkpoint: ("checkpointing", "save"),
    Category.evaluation: ("eval", "evaluate", "validation", "validate", "test"),
    Category.step: ("iteration", "batch"),
}
_CATEGORIES = {name: each for each, names in _WORDS.items() for name in names}
_CATEGORIES |= {each.name: each for each in Category}
_UNIT = re.compile(r"^(.*?)[ _]*[\[(]?(?:(?<=[ _\[(])|(?<=\())(s|sec|seconds|ms|us|ns)[\])]?$")
_LINE_END = re.compile(r"\r\n|\n|\r")
_SINCE_1973 = 100_000_000 * 1_000_000_000
WANTED = (
    "a table of spans has a heading with 'category', 'start' and 'duration' (or 'stop'), and may "
    "have 'rank', 'process', 'node', 'thread', 'epoch', 'step', 'name', 'bytes'; times are in "
    "seconds, or their names end with _ms, _us or _ns"
)


def split_heading(start: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The delimiter, and of each known column its place and its unit; nothing if it is no heading.

    >>> split_heading("Rank;Category;Start (ms);Duration_us")[1]["start"]
    (2, 1000000)
    """
    first = _LINE_END.split(start.lstrip("\ufeff"), maxsplit=1)[0]
    delimiter = max(",;\t", key=first.count)
    try:
        heading = next(csv.reader([first], delimiter=delimiter), [])
    except csv.Error:
        return delimiter, {}
    found: dict[str, tuple[int, int]] = {}
    for place, told in enumerate(heading):
        name, unit_ns = _name_and_unit(told.strip().lower().lstrip("#").strip())
        known = next((each for each, names in COLUMNS.items() if name in names), None)
        if known is not None:
            found.setdefault(known, (place, unit_ns))
    return (delimiter, found) if len(heading) > 1 else (delimiter, {})


def _name_and_unit(told: str) -> tuple[str, int]:
    if match := _UNIT.match(told):
        name = match[1].rstrip(" _[(").replace(" ", "_")
        if name:
            return name, UNITS[match[2]]
    return told.replace(" ", "_"), UNITS["s"]


def is_csv_table(start: str) -> bool:
    """Whether a file that begins so has a heading with times and categories."""
    _, columns = split_heading(start)
    return {"category", "start"} <= columns.keys()


def read_csv_table(file: TextFile) -> list[FileContent]:
    """A content for each process: without a column of ranks, ``process`` is the rank."""
    delimiter, columns = split_heading(file.start())
    if "duration" not in columns and "stop" not in columns:
        raise FormatError(f"{file.path} has no column of durations: {WANTED}")
    table = _Table(columns)
    wrong: list[int] = []
    lines = (line for whole in file.lines() for line in _LINE_END.split(whole.removesuffix("\r")))
    next(lines, None)
    rows = csv.reader(lines, delimiter=delimiter)
    for number in count(2):
        try:
            if (row := next(rows, None)) is None:
                break
            if any(row):
                table.add(row)
        except (ValueError, IndexError, csv.Error):
            wrong.append(number)
    if wrong:
        file.notes.append(
            f"{file.path} has {len(wrong)} lines that cannot be understood, the first of them "
            f"line {wrong[0]}: left out"
        )
    return [process.content(file.path) for process in table.processes.values()]


class _Table:
    def __init__(self, columns: Mapping[str, tuple[int, int]]) -> None:
        self._columns = columns
        self.processes: dict[tuple[str, str, int], ImportedProcess] = {}

    def add(self, row: Sequence[str]) -> None:
        told = {name: row[place].strip() for name, (place, _) in self._columns.items()}
        start = nanoseconds(told["start"], self._columns["start"][1])
        if "duration" in told:
            duration = nanoseconds(told["duration"], self._columns["duration"][1])
        else:
            duration = nanoseconds(told["stop"], self._columns["stop"][1]) - start
        word = told["category"]
        category = _CATEGORIES.get(word.lower().replace(" ", "_"), Category.user)
        name = told.get("name") or (word if word != category.name else "")
        flags = Flag(_whole(told, "flags", 0))
        thread, process = _thread(told.get("thread", "")), self._process(told, start)
        if told.get("thread_name"):
            process.name_thread(thread, told["thread_name"])
        process.add(
            category,
            name,
            start,
            duration,
            thread=thread,
            nbytes=_whole(told, "bytes", 0),
            layer=told.get("layer", ""),
            sample=_whole(told, "sample", -1),
            step=_whole(told, "step", -1),
            epoch=_whole(told, "epoch", -1),
            tier=_tier(told.get("tier", ""), category),
            flags=flags | (Flag.exposed if category is Category.wait else Flag(0)),
        )

    def _process(self, told: Mapping[str, str], start: int) -> ImportedProcess:
        text, host = told.get("process", ""), told.get("node", "")
        rank = _whole(told, "rank", _whole(told, "process", 0) if "rank" not in told else 0)
        if not 0 <= rank <= MOST_RANKS:
            raise ValueError("not a rank")
        found = self.processes.get((host, text, rank))
        if found is None:
            facts: dict[str, Any] = {"rank": rank, "host": host, "clock": f"{host} table"}
            facts["pid"] = int(text) if text.isdecimal() else 0
            facts["clocks"] = [[0, 0]] if start > _SINCE_1973 else []
            found = self.processes[host, text, rank] = ImportedProcess(**facts)
        return found


def _thread(told: str) -> Any:
    return int(told) if told.isdecimal() else told


def _whole(told: Mapping[str, str], name: str, default: int) -> int:
    text = told.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        found = float(text)
        if not isfinite(found):
            raise
        return int(found)


def _tier(told: str, category: Category) -> Tier:
    if told:
        return Tier[told] if told in Tier.__members__ else Tier.none
    return Tier.file if category is Category.read else Tier.none
