"""What the clocks of hosts were behind each other while a run went on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace import active
from hyperslab.trace.recorder import Recorder

ROUNDS = 8
"""Of messages, of which the fastest counts."""
BATCHES_BETWEEN = 256
"""Comparisons beside a loop."""


class Channel(Protocol):
    """Between all ranks; see ``comm.side_channel``."""

    rank: int

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
    ) -> None: ...


def clock_name() -> str | None:
    """What the others are to be told of this rank: its clock, if it records."""
    return None if active.recorder is None else active.recorder.clock.name


class ClockComparison:
    """Compares the clock of each host with that of the first rank that records.

    ``names`` are what all ranks told of their clocks. Calls are collective over all ranks.
    """

    def __init__(self, names: Sequence[str | None], channel: Channel) -> None:
        self._channel, self._recorder = channel, active.recorder
        self._num_asked = 0
        firsts: dict[str, int] = {}
        for rank, name in enumerate(names):
            if name is not None:
                firsts.setdefault(name, rank)
        self._reference, *self._others = firsts.values() or [0]

    def now_and_then(self) -> None:
        """Compares them when it is called first, and at some of the later calls."""
        if self._others and not self._num_asked % BATCHES_BETWEEN:
            self.compare()
        self._num_asked += 1

    def compare(self) -> None:
        if self._recorder is None:
            return
        for other in self._others:
            if self._channel.rank == self._reference:
                self._answer(self._recorder, other)
            elif self._channel.rank == other:
                self._ask(self._recorder)

    def _ask(self, recorder: Recorder) -> None:
        """The less time passes between question and answer, the better is known when it was."""
        sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
        found = []
        for _ in range(ROUNDS):
            start = recorder.now()
            self._channel.swap([(self._reference, sent)], [])
            self._channel.swap([], [(self._reference, received)])
            stop = recorder.now()
            middle = (start + stop) // 2
            found.append((stop - start, middle, int(received[0]) - middle))
        recorder.note_offset(*min(found)[1:])

    def _answer(self, recorder: Recorder, other: int) -> None:
        sent, received = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for _ in range(ROUNDS):
            self._channel.swap([], [(other, received)])
            sent[0] = recorder.now()
            self._channel.swap([(other, sent)], [])
