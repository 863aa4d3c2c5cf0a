"""What a trace is made of: spans of time, and the processes and threads that spent it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Category(IntEnum):
    """What a span of time was spent on."""

    read = 0
    """Bytes from a file, opening it included; the name is the file's."""
    decode = 1
    """Decompression."""
    stage = 2
    """Copies from the file system to a node's own disk."""
    exchange = 3
    """Samples from the memory of other ranks."""
    wait = 4
    """The loop waited for a batch."""
    delay = 5
    """A batch waited for the loop."""
    copy = 6
    """From host memory to the device."""
    compute = 7
    """Forward and backward passes."""
    halo = 8
    """From posting halo messages until they have arrived, and waiting for them."""
    all_reduce = 9
    """Averaging gradients, and sums over ranks."""
    optimizer = 10
    checkpoint = 11
    evaluation = 12
    step = 13
    epoch = 14
    user = 15
    """``hs.span`` of a user's own code."""
    other = 16


class Tier(IntEnum):
    """Where the bytes of a span came from."""

    none = 0
    file = 1
    disk = 2
    """The node's own: staged or spilled."""
    memory = 3
    """Of this rank, or of one on its node."""
    peer = 4
    """The memory of a rank on another node."""


class Flag(IntFlag):
    """What else is known of a span."""

    device = 1
    """Time of a GPU."""
    exposed = 2
    """The main loop waits in it, by construction."""
    opening = 4
    """A file was opened, and nothing of it was read yet."""


SPAN = np.dtype(
    [
        ("start", "<i8"),  # nanoseconds
        ("duration", "<i8"),  # nanoseconds
        ("nbytes", "<i8"),
        ("sample", "<i8"),  # -1: none
        ("step", "<i4"),  # -1: none
        ("epoch", "<i4"),  # -1: none
        ("name", "<u4"),  # a string
        ("layer", "<u4"),  # a string, 0: none
        ("thread", "<u4"),  # an index
        ("process", "<u4"),  # an index
        ("category", "u1"),
        ("tier", "u1"),
        ("flags", "<u2"),
    ]
)
"""One span. Strings, threads and processes are indices into the lists of its ``Trace``."""

NOTHING: dict[str, int] = {"sample": -1, "step": -1, "epoch": -1}
"""Fields that are not 0 where nothing is known."""


def empty_spans(num: int) -> NDArray[Any]:
    """``num`` spans of which nothing is known yet."""
    spans = np.zeros(num, SPAN)
    for name, value in NOTHING.items():
        spans[name] = value
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that spent time."""

    rank: int = 0
    node: int = 0
    """Number of its host among those of the trace."""
    pid: int = 0
    host: str = ""
    program: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread of ``processes[process]``, or a stream of its GPU."""

    process: int = 0
    tid: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of a run, by start, on one clock."""

    spans: NDArray[Any]
    """Of dtype ``SPAN``, sorted by start."""
    strings: list[str] = field(default_factory=lambda: [""])
    """The first is empty."""
    processes: list[Process] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was damaged and left out, and how clocks were aligned, in words."""

    def __len__(self) -> int:
        return len(self.spans)

    def of(self, *categories: Category) -> NDArray[Any]:
        """The spans of some categories."""
        return self.spans[np.isin(self.spans["category"], categories)]
