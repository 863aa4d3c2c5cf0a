"""Spans of other tools' files, while these are read: columns that grow, one set a process."""

from __future__ import annotations

import re
from array import array
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.trace.file import FileContent
from hyperslab.trace.span import SPAN, Category, Thread, Tier, empty_spans

MOST_NS = 1 << 61
"""What is later or longer is no time."""
MOST_RANKS = (1 << 31) - 1
_MOST, _MOST_STEPS = (1 << 63) - 1, (1 << 31) - 1

_DECIMAL = re.compile(r"(-)?(\d+)(?:\.(\d*))?")
_COLUMNS = {name: "q" for name in SPAN.names or () if name != "process"}


class ImportedProcess:
    """The spans of one process. ``facts`` are those of a trace file."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self._columns = {name: array(code) for name, code in _COLUMNS.items()}
        self._strings: dict[str, int] = {"": 0}
        self._threads: dict[Any, int] = {}
        self._names: dict[Any, str] = {}

    def add(
        self,
        category: Category,
        name: str,
        start: int,
        duration: int,
        *,
        thread: Any = 0,
        nbytes: int = 0,
        layer: str = "",
        sample: int = -1,
        step: int = -1,
        epoch: int = -1,
        tier: Tier = Tier.none,
        flags: int = 0,
    ) -> None:
        """A span of a thread, which may be told apart by any value. Times are in nanoseconds."""
        if not (0 <= duration < MOST_NS and abs(start) < MOST_NS):
            raise ValueError("not a time")
        if not (abs(nbytes) <= _MOST and abs(sample) <= _MOST):
            raise ValueError("more than there can be")
        if max(abs(step), abs(epoch)) > _MOST_STEPS:
            raise ValueError("not a step")
        strings, threads = self._strings, self._threads
        name_number = strings.setdefault(name, len(strings))
        layer_number = strings.setdefault(layer, len(strings))
        thread_number = threads.setdefault(thread, len(threads))
        values: tuple[int, ...] = (start, duration, nbytes, sample, step, epoch, name_number)
        values += (layer_number, thread_number, category, tier, flags)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def name_thread(self, thread: Any, name: str) -> None:
        self._names[thread] = name

    def content(self, path: Path) -> FileContent:
        columns = {name: np.frombuffer(each, np.int64) for name, each in self._columns.items()}
        spans = empty_spans(len(columns["start"]))
        for name, column in columns.items():
            spans[name] = column
        threads = [_thread(key, self._names.get(key, "")) for key in self._threads]
        blocks = [spans] if len(spans) else []
        return FileContent(path, self.facts, list(self._strings), threads, blocks)


def _thread(key: Any, name: str) -> Thread:
    last = key[-1] if isinstance(key, tuple) else key
    number = last if isinstance(last, int) and 0 <= last < 1 << 62 else 0
    return Thread(tid=number, name=name or ("" if number or not last else str(last)))


def nanoseconds(value: Any, unit_ns: int, base_ns: int = 0) -> int:
    """A time as a tool writes it. Raises ``ValueError`` for what is none.

    >>> nanoseconds("1.5", 1000), nanoseconds(7, 1000, base_ns=2)
    (1500, 7002)
    """
    match = _DECIMAL.fullmatch(str(value).strip())
    if match:
        # Digits, not a float: those of a Unix time do not fit into one.
        sign, whole, fraction = match.groups(default="")
        digits = (fraction or "0")[:18]
        found: int = int(whole) * unit_ns + int(digits) * unit_ns // 10 ** len(digits)
        return base_ns + (-found if sign else found)
    found_float = float(value) * unit_ns
    if not isfinite(found_float):
        raise ValueError("not a time")
    return round(found_float) + base_ns
