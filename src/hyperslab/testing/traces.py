"""Traces made up for tests: files of ranks whose spans are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """A training run whose truth is known: two readers in turn, halos while layers compute.

    Seconds, each of one step of one rank; of reads, of one that follows another.
    """

    num_ranks: int = 2
    num_epochs: int = 3
    num_steps: int = 8
    num_layers: int = 4
    read: float = 0.3
    first_read: float = 0.9
    """In epoch 0."""
    layer: float = 0.05
    copy: float = 0.01
    reduce: float = 0.02
    optimizer: float = 0.01
    checkpoint: float = 0.2
    """After each epoch."""
    slowness: float = 1.0
    """How many times as long as the others the last rank computes."""

    def spans(self) -> list[list[Made]]:
        """Those of each rank; they meet at the end of every step."""
        return [self._rank(rank) for rank in range(self.num_ranks)]

    def _rank(self, rank: int) -> list[Made]:
        made: list[Made] = []
        slowness = self.slowness if rank == self.num_ranks - 1 else 1.0
        at = 0.0
        for epoch in range(self.num_epochs):
            start = ready = at
            for step in range(self.num_steps):
                begun, name = at, f"data/{(7 * step + epoch) % 5}.h5"
                place: Any = {"epoch": epoch, "step": epoch * self.num_steps + step}
                seconds = self.first_read if epoch == 0 else self.read
                of_reader: Any = {"thread": 1 + step % 2, "epoch": epoch, "tier": Tier.file}
                read = Made(Category.read, ready, ready + seconds, name, nbytes=NBYTES, **of_reader)
                made.append(read)
                ready = read.stop
                if ready > at:
                    flags = Flag.exposed
                    made.append(Made(Category.wait, at, ready, "next batch", flags=flags, **place))
                    at = ready
                at = self._step(made, at, slowness, place)
                made.append(Made(Category.step, begun, at, "step", **place))
            made.append(Made(Category.epoch, start, at, "epoch", epoch=epoch))
            made.append(Made(Category.checkpoint, at, at + self.checkpoint, "checkpoint"))
            at += self.checkpoint
        return made

    def _step(self, made: list[Made], at: float, slowness: float, place: Any) -> float:
        """What follows once the batch is there; gives when it ends."""
        made.append(Made(Category.copy, at, at + self.copy, "batch", nbytes=NBYTES, **place))
        at += self.copy
        for layer in range(self.num_layers):
            stop = at + self.layer * slowness
            of: Any = {"layer": f"conv{layer}", **place}
            made.append(Made(Category.compute, at, stop, "forward", **of))
            made.append(Made(Category.halo, at, stop, "halo", thread=4, nbytes=NBYTES // 50, **of))
            at = stop
        slowest = self.num_layers * self.layer * (self.slowness if self.num_ranks > 1 else slowness)
        stop = at + slowest - self.num_layers * self.layer * slowness + self.reduce
        made.append(Made(Category.all_reduce, at, stop, "sum", flags=Flag.exposed, **place))
        made.append(Made(Category.optimizer, stop, stop + self.optimizer, "SGD", **place))
        return stop + self.optimizer


NBYTES = 50_000_000
"""Of a batch in a made-up run."""


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
