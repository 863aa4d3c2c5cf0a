"""Traces made up for tests: files of ranks whose spans are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.file import SUFFIX, TraceFile
from hyperslab.trace.span import Category, Flag, Thread, Tier, empty_spans

SECOND = 1_000_000_000
UNIX_NS = 1_700_000_000 * SECOND
"""When made-up clocks begin."""


class Made(NamedTuple):
    """A span in seconds from the trace's start."""

    category: Category
    start: float
    stop: float
    name: str = ""
    thread: int = 0
    nbytes: int = 0
    step: int = -1
    epoch: int = -1
    sample: int = -1
    tier: Tier = Tier.none
    layer: str = ""
    flags: Flag = Flag(0)


def write_trace(
    folder: Path,
    spans_of_ranks: Sequence[Iterable[Made]],
    *,
    threads: Sequence[str] = ("main", "reader-0", "reader-1", "gpu compute", "gpu halo"),
    hosts: Sequence[str] = ("node0",),
    clock_offsets: Sequence[float] = (),
) -> list[Path]:
    """Writes ``rank00000.hstrace`` and so on; rank r is on host ``hosts[r % len(hosts)]``.

    Clocks of the hosts are ``clock_offsets`` seconds ahead of the first, which the files tell.
    """
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for rank, made in enumerate(spans_of_ranks):
        node = rank % len(hosts)
        ahead = round((clock_offsets[node] if node < len(clock_offsets) else 0) * SECOND)
        path = folder / f"rank{rank:05}{SUFFIX}"
        file = TraceFile(path)
        facts: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "host": hosts[node]}
        facts |= {"clock": f"clock of {hosts[node]}", "clocks": [[ahead, UNIX_NS + ahead]]}
        file.facts(facts | {"offsets": [[ahead, -ahead]], "program": "python train.py"})
        file.threads([Thread(tid=100 + i, name=name) for i, name in enumerate(threads)])
        strings: dict[str, int] = {"": 0}
        spans = spans_from(made, strings)
        spans["start"] += ahead
        file.strings(list(strings)[1:])
        file.spans(spans)
        file.close()
        paths.append(path)
    return paths


def spans_from(made: Iterable[Made], strings: dict[str, int]) -> NDArray[Any]:
    """Spans as arrays; ``strings`` gets the numbers of their names."""
    made = list(made)
    spans = empty_spans(len(made))
    for name in ("thread", "nbytes", "step", "epoch", "sample", "category", "tier", "flags"):
        spans[name] = [int(getattr(each, name)) for each in made]
    for name in ("name", "layer"):
        spans[name] = [strings.setdefault(getattr(each, name), len(strings)) for each in made]
    spans["start"] = [round(each.start * SECOND) for each in made]
    spans["duration"] = [round((each.stop - each.start) * SECOND) for each in made]
    return spans


def write_random_trace(folder: Path, num: int, *, num_ranks: int = 4, num_epochs: int = 5) -> None:
    """About ``num`` spans of all categories on some threads, to see what many of them cost."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    names = [f"{each.name} {i}" for each in Category for i in range(10)]
    for rank in range(num_ranks):
        file = TraceFile(folder / f"rank{rank:05}{SUFFIX}")
        host = f"node{rank // 2}"
        facts = {"rank": rank, "pid": 100 + rank, "host": host, "clock": host}
        file.facts(facts | {"clocks": [[0, UNIX_NS]], "offsets": [[0, 0]]})
        file.threads([Thread(tid=i, name=f"thread {i}") for i in range(8)])
        file.strings(names)
        left, at = num // num_ranks, 0
        while left > 0:
            spans = empty_spans(min(left, 100_000))
            size, left = len(spans), left - len(spans)
            spans["duration"] = rng.integers(1_000, 100_000, size)
            spans["start"] = at + np.cumsum(rng.integers(0, 20_000, size))
            at = int(spans["start"][-1])
            spans["category"] = rng.integers(0, Category.step, size)
            spans["name"] = spans["category"] * 10 + rng.integers(1, 11, size)
            spans["thread"] = rng.integers(0, 8, size)
            spans["nbytes"] = rng.integers(0, 1 << 24, size)
            spans["epoch"] = np.minimum(num_epochs - 1, at * num_epochs // (num * 10_000 + 1))
            file.spans(spans)
        file.close()
