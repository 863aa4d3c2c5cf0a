"""What if: the steps of a run once more, with reads or messages that cost nothing, more readers.

Each step of a rank is what it does itself (compute, copies, optimizer, and what nobody knows), the
samples it waits for, and the messages it waits for. Ranks meet once a step: a step ends when the
slowest rank has ended its own part, and then come the messages, which take what they took the rank
that waited least for them; what others waited longer was for that rank. Readers work on the batches
to come, a few ahead of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.analysis import Analysis
from hyperslab.trace.analysis.bandwidth import SideBySide
from hyperslab.trace.analysis.periods import IO
from hyperslab.trace.analysis.rank_report import RankReport, StepTimes
from hyperslab.trace.span import Category

Floats = NDArray[np.float64]
MOST_STEPS = 4000
"""Those of longer runs are taken several at once."""
MOST_READERS = 32
LEAST_AHEAD = 2
FILES = (Category.stage, Category.read, Category.decode)
MESSAGES = (Category.halo, Category.all_reduce)
LEAST_READS, LEAST_TIME = 16, 0.1
"""Reads, and the share of the time of all: from these on it is known what so many at once bring."""
HIDDEN_SHARE, LEFT_SHARE = 0.02, 0.2
"""Of an epoch, and of what was waited before: less waiting than one of these is as good as none."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The run as it would have been."""

    name: str
    words: str
    seconds: float
    """Of all epochs."""
    saved_seconds: float

    @property
    def saved_share(self) -> float:
        whole = self.seconds + self.saved_seconds
        return self.saved_seconds / whole if whole else 0.0


@dataclass(frozen=True)
class Steps:
    """Seconds of steps (rows) of ranks (columns)."""

    own: Floats
    waited: Floats
    """For samples."""
    messages: Floats
    exchange: Floats
    """Of ``waited``: for the memory of other ranks."""
    files: Floats
    """Of ``waited``: while readers staged, read or decoded."""
    reading: Floats
    """Of reader threads, added up."""
    readers: Floats
    """Threads of each rank."""
    at_once: Floats
    """How many of them worked while the loop waited."""
    ahead: Floats
    epoch: NDArray[np.int64]

    @property
    def seconds(self) -> Floats:
        """Of each step, as it was: that of the slowest rank."""
        found: Floats = np.max(self.own + self.waited + self.messages, axis=1)
        return found

    def of_epoch(self, epoch: int) -> Steps:
        chosen = self.epoch == epoch
        return self.changed(lambda each: each[chosen], self.epoch[chosen])

    def changed(self, change: Callable[[Floats], Floats], epoch: NDArray[np.int64]) -> Steps:
        """With other rows."""
        names = ("own", "waited", "messages", "exchange", "files", "reading")
        return replace(self, epoch=epoch, **{name: change(getattr(self, name)) for name in names})


def replay(steps: Steps, *, waited: Floats | None = None, messages: Floats | None = None) -> float:
    """Seconds of all steps, with other times of waiting for samples or for messages."""
    waited = steps.waited if waited is None else waited
    messages = steps.messages if messages is None else messages
    if not steps.own.size:
        return 0.0
    return float((np.max(steps.own + waited, axis=1) + np.min(messages, axis=1)).sum())


def what_ifs(analysis: Analysis) -> list[WhatIf]:
    """Those that this run has numbers for; what they save is of its measured time."""
    steps = steps_of(analysis.ranks)
    if steps is None:
        return []
    measured, base = analysis.total.seconds, replay(steps)
    if not base or not measured:
        return []

    def found(name: str, words: str, seconds: float) -> WhatIf:
        # What the replay does not see, such as ranks that drift apart, stays as it was.
        saved = min(measured, max(0.0, base - seconds) * measured / base)
        return WhatIf(name, words, measured - saved, saved)

    cases = []
    nothing = np.zeros_like(steps.waited)
    if steps.waited.any():
        cases.append(found("io_free", "if samples came at once", replay(steps, waited=nothing)))
    if steps.messages.any() or steps.exchange.any():
        seconds = replay(steps, waited=steps.waited - steps.exchange, messages=nothing)
        cases.append(found("network_free", "if messages took no time", seconds))
    if steps.files.any() and steps.readers.all():
        seconds = replay(steps, waited=with_readers(steps, 1, gain_of(analysis.reading)))
        cases.append(found("one_more_reader", "with one more reader thread a rank", seconds))
    if len(analysis.ranks) > 1:
        level = np.repeat(steps.own.mean(axis=1, keepdims=True), steps.own.shape[1], axis=1)
        even = np.repeat(steps.waited.mean(axis=1, keepdims=True), steps.own.shape[1], axis=1)
        seconds = replay(replace(steps, own=level), waited=even)
        cases.append(found("even_ranks", "if all ranks were equally fast", seconds))
    return cases


def steps_of(ranks: Sequence[RankReport]) -> Steps | None:
    """Those that all ranks have gone through."""
    if not ranks:
        return None
    common = set(_keys(ranks[0].steps))
    for rank in ranks[1:]:
        common &= set(_keys(rank.steps))
    if not common:
        return None
    columns = [_column(rank.steps, common) for rank in ranks]
    parts = {name: np.stack([each[name] for each in columns], axis=1) for name in columns[0]}
    epochs = np.array(sorted(common), np.int64)[:, 0]
    readers = np.array([rank.num_readers for rank in ranks], np.float64)
    at_once = [rank.at_once or max(1, rank.num_readers) for rank in ranks]
    ahead = np.array([max(LEAST_AHEAD, rank.ahead + 1) for rank in ranks], np.float64)
    return _fewer(
        Steps(**parts, readers=readers, at_once=np.array(at_once), ahead=ahead, epoch=epochs)
    )


def _keys(steps: StepTimes) -> list[tuple[int, int]]:
    return list(zip(steps.epoch.tolist(), steps.number.tolist(), strict=True))


def _column(steps: StepTimes, common: set[tuple[int, int]]) -> dict[str, Floats]:
    keys = _keys(steps)
    chosen = [place for _, place in sorted((key, i) for i, key in enumerate(keys) if key in common)]
    zero = np.zeros(len(keys))

    def exposed(*categories: Category) -> Floats:
        found: Floats = sum((steps.exposed.get(each, zero) for each in categories), zero)[chosen]
        return found

    waited, messages = exposed(*IO) + steps.making[chosen], exposed(*MESSAGES)
    return {
        "own": np.maximum(steps.seconds[chosen] - waited - messages, 0.0),
        "waited": waited,
        "messages": messages,
        "exchange": exposed(Category.exchange),
        "files": exposed(*FILES),
        "reading": steps.reading[chosen],
    }


def _fewer(steps: Steps) -> Steps:
    """Several steps of an epoch at once, where there are too many to go through one by one."""
    num = len(steps.epoch)
    if num <= MOST_STEPS:
        return steps
    pieces = np.arange(num) * MOST_STEPS // num
    starts = np.flatnonzero(np.diff(pieces, prepend=-1) | np.diff(steps.epoch, prepend=-1))
    return steps.changed(lambda each: np.add.reduceat(each, starts, axis=0), steps.epoch[starts])


# More readers


def with_readers(steps: Steps, more: int, gain: float) -> Floats:
    """How long steps would wait for samples if every rank had ``more`` reader threads.

    ``gain`` is what a thread more is worth, of one that has the files for itself.
    """
    now = _waits(steps, steps.at_once)
    then = _waits(steps, steps.at_once * (1 + more * gain / steps.readers))
    now[_firsts(steps)] = then[_firsts(steps)] = 0.0
    before, after = now.sum(axis=0), then.sum(axis=0)
    shrunk = np.divide(after, before, out=np.ones_like(after), where=before > 0)
    shortened = steps.files * (1.0 - np.minimum(shrunk, 1.0))
    shortened[_firsts(steps)] = 0.0
    left: Floats = steps.waited - shortened
    return left


def _firsts(steps: Steps) -> NDArray[np.intp]:
    """The rows of first batches of epochs, before which nothing was read ahead."""
    return np.unique(steps.epoch, return_index=True)[1]


def _waits(steps: Steps, readers: Floats) -> Floats:
    """The waiting of a loop whose batches are read by so many threads, each epoch from its start.

    Threads share the work on a batch, and are ahead of the loop by a few batches at most.
    """
    rest = steps.own + steps.messages
    waits = np.zeros_like(rest)
    for number in np.unique(steps.epoch):
        rows = np.flatnonzero(steps.epoch == number)
        ended = np.zeros((len(rows) + 1, rest.shape[1]))
        ready = np.zeros(rest.shape[1])
        ahead = steps.ahead.astype(np.int64)
        columns = np.arange(rest.shape[1])
        for i, row in enumerate(rows):
            may_begin = ended[np.maximum(i + 1 - ahead, 0), columns]
            ready = np.maximum(ready, may_begin) + steps.reading[row] / readers
            waits[row] = np.maximum(ready - ended[i], 0.0)
            ended[i + 1] = ended[i] + waits[row] + rest[row]
    return waits


def gain_of(reading: Sequence[SideBySide]) -> float:
    """What one more read at once brings, of what the first brings; 1 where that was not seen."""
    seen = seen_at_once(reading)
    if len(seen) < 2:
        return 1.0
    few, many = seen[0], seen[-1]
    per_read = (many.rate - few.rate) / (many.num_reads - few.num_reads)
    return float(np.clip(per_read / (few.rate / few.num_reads), 0.0, 1.0))


def seen_at_once(reading: Sequence[SideBySide]) -> list[SideBySide]:
    """Those that went on for long enough to tell something."""
    least = LEAST_TIME * sum(each.seconds for each in reading)
    return [each for each in reading if each.count >= LEAST_READS and each.seconds >= least]


def readers_to_hide(analysis: Analysis, epoch: int) -> int | None:
    """How many reader threads more a rank needs to hide reads of an epoch; None: they would not."""
    steps = steps_of(analysis.ranks)
    if steps is None or not steps.files.any() or not steps.readers.all():
        return None
    steps = steps.of_epoch(epoch)
    whole, gain = steps.seconds.sum(), gain_of(analysis.reading)
    if not whole or gain < 0.1:
        return None
    for more in range(1, MOST_READERS + 1):
        left = np.max(with_readers(steps, more, gain), axis=1)[1:].sum()
        if left <= max(HIDDEN_SHARE * whole, LEFT_SHARE * np.max(steps.waited, axis=1)[1:].sum()):
            return more
    return None
