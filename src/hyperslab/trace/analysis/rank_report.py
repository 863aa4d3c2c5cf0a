"""All numbers of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.analysis.attribution import Attribution
from hyperslab.trace.analysis.bandwidth import counted_nbytes
from hyperslab.trace.analysis.intervals import Intervals, Times, amounts_before, grouped, union
from hyperslab.trace.analysis.lanes import Lane
from hyperslab.trace.analysis.loop import READERS, Rank, Step
from hyperslab.trace.analysis.periods import Period, Share, add_periods
from hyperslab.trace.span import Category, Process, Thread

SECOND = 1e9
MOST_NAMES = 50
"""Of a user's spans."""
_NOT_OF_A_LOOP = (*READERS, Category.other)
_NO_TIMES: Times = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    name: str
    pid: int
    is_device: bool
    seconds: dict[Category, float]


@dataclass(frozen=True)
class StepTimes:
    """Of each step of a rank: arrays of one length."""

    epoch: NDArray[np.int64]
    number: NDArray[np.int64]
    seconds: NDArray[np.float64]
    exposed: dict[Category, NDArray[np.float64]]
    making: NDArray[np.float64]
    """Seconds in which the loop waited for code of its own that makes batches."""
    reading: NDArray[np.float64]
    """Seconds of reader threads."""


@dataclass(frozen=True)
class RankReport:
    rank: int
    processes: list[Process]
    epochs: dict[int, Period]
    outside: Period
    """What lies before, between and after epochs."""
    total: Period
    """Of all epochs."""
    broken_off: dict[int, int]
    """Epochs that were not ended, with the steps that were made."""
    own_code: dict[str, float]
    """Exposed seconds of the user's spans by name, in epochs; of spans in spans the inner."""
    threads: list[ThreadTimes]
    num_readers: int
    """Threads other than the loop's that read, decode or fetch samples, at one time."""
    at_once: float
    """How many of them were at work while the loop waited for them."""
    ahead: int
    """Batches that were ready at once, at most."""
    has_device_times: bool
    knows_loop: bool
    """Whether anything tells of a loop: its steps, what it computes, that it waits."""
    has_steps: bool
    steps: StepTimes
    step_list: list[Step]
    busy: dict[Category, Lane]
    exposed: dict[Category, Lane]


def report_rank(rank: Rank, attribution: Attribution, columns: Times) -> RankReport:
    windows = [*rank.epochs.values()]
    outside = rank.extent - union(windows)
    threads = _by_thread(rank)
    *periods, left = [
        _period(attribution, window, threads, nbytes)
        for window, nbytes in zip([*windows, outside], _nbytes(rank, windows), strict=True)
    ]
    return RankReport(
        rank=rank.rank,
        processes=rank.processes,
        epochs=dict(zip(rank.epochs, periods, strict=True)),
        outside=left,
        total=add_periods(periods),
        broken_off=rank.broken_off,
        own_code=_own_code(rank, attribution, windows),
        threads=_threads(rank),
        num_readers=_num_readers(rank),
        at_once=_at_once(rank, attribution),
        ahead=_ahead(rank),
        has_device_times=bool(rank.on_device.any()),
        knows_loop=bool(np.any(~np.isin(rank.categories, _NOT_OF_A_LOOP))),
        has_steps=rank.has_steps,
        steps=_steps(rank, attribution),
        step_list=rank.steps,
        busy={category: Lane.of(each, columns) for category, each in attribution.busy.items()},
        exposed={c: Lane.of(each, columns) for c, each in attribution.exposed.items()},
    )


def _period(
    attribution: Attribution,
    window: Intervals,
    threads: dict[Category, list[Intervals]],
    nbytes: NDArray[np.float64],
) -> Period:
    categories: dict[Category, Share] = {
        category: Share(
            busy.within(window) / SECOND,
            attribution.exposed.get(category, Intervals()).within(window) / SECOND,
            _seconds_of_threads(threads.get(category, []), busy, window),
            round(nbytes[category]),
        )
        for category, busy in sorted(attribution.busy.items())
        if category not in (Category.step, Category.epoch)
    }
    return Period(window.total / SECOND, categories)


def _seconds_of_threads(threads: list[Intervals], busy: Intervals, window: Intervals) -> float:
    """What no span tells of is the loop's alone."""
    nanoseconds = sum(each.within(window) for each in threads) if threads else busy.within(window)
    return nanoseconds / SECOND


def _by_thread(rank: Rank) -> dict[Category, list[Intervals]]:
    """When each thread did something; its own spans that overlap count once."""
    found: dict[Category, list[Intervals]] = {}
    for key, where in grouped(_threads_and_categories(rank)):
        busy = Intervals.of(rank.starts[where], rank.stops[where])
        found.setdefault(Category(key % len(Category)), []).append(busy)
    return found


def _threads_and_categories(rank: Rank) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = rank.spans["thread"].astype(np.int64) * len(Category)
    return keys + rank.categories


def _nbytes(rank: Rank, windows: list[Intervals]) -> NDArray[np.float64]:
    """By epoch, the one a span tells, else the one it began in, and by category."""
    num = len(windows) + 1
    place = np.full(len(rank.starts), num - 1)
    owners = np.repeat(np.arange(len(windows)), [len(each) for each in windows])
    starts = np.concatenate([_NO_TIMES, *(each.starts for each in windows)])
    stops = np.concatenate([_NO_TIMES, *(each.stops for each in windows)])
    order = np.argsort(starts)
    at = np.searchsorted(starts[order], rank.starts, side="right") - 1
    began = at >= 0
    began[began] = rank.starts[began] < stops[order][at[began]]
    place[began] = owners[order][at[began]]
    numbers, told = np.array([*rank.epochs], np.int64), rank.spans["epoch"]
    if len(numbers):
        at = np.minimum(np.searchsorted(numbers, told), len(numbers) - 1)
        known = numbers[at] == told
        place[known] = at[known]
    counted = counted_nbytes(rank.spans, rank.trace.strings)
    keys = place * len(Category) + rank.categories
    sums = np.bincount(keys, weights=counted, minlength=num * len(Category))
    return sums.astype(np.float64).reshape(num, len(Category))


def _own_code(rank: Rank, attribution: Attribution, windows: list[Intervals]) -> dict[str, float]:
    left = attribution.exposed.get(Category.user, Intervals()) & union(windows)
    spans = np.flatnonzero(rank.categories == Category.user)
    lengths = rank.stops - rank.starts
    names = {name: spans[where] for name, where in grouped(rank.spans["name"][spans])}
    longest = sorted(names, key=lambda name: -int(lengths[names[name]].sum()))[:MOST_NAMES]
    found = {}
    for name in sorted(longest, key=lambda name: float(lengths[names[name]].mean())):
        given = left & Intervals.of(rank.starts[names[name]], rank.stops[names[name]])
        left = left - given
        if len(given):
            found[rank.trace.strings[name]] = given.total / SECOND
    return found


def _threads(rank: Rank) -> list[ThreadTimes]:
    """What each thread did for how long; its own spans that overlap count once."""
    seconds: dict[int, dict[Category, float]] = {}
    is_device: dict[int, bool] = {}
    for key, where in grouped(_threads_and_categories(rank)):
        thread, category = divmod(key, len(Category))
        if category in (Category.step, Category.epoch, Category.delay):
            continue
        busy = Intervals.of(rank.starts[where], rank.stops[where])
        seconds.setdefault(thread, {})[Category(category)] = busy.total / SECOND
        is_device.setdefault(thread, bool(rank.on_device[where[0]]))
    threads, processes = rank.trace.threads, rank.trace.processes
    found = []
    for number, times in sorted(seconds.items()):
        known = threads[number] if number < len(threads) else Thread(tid=number)
        pid = processes[known.process].pid if known.process < len(processes) else 0
        name = known.name or f"thread {known.tid}"
        found.append(ThreadTimes(name, pid, is_device[number], times))
    return found


def _num_readers(rank: Rank) -> int:
    """Threads that come and go, as a loader for each epoch has them, do not add up."""
    others = np.isin(rank.categories, READERS) & ~rank.on_loop & ~rank.on_device
    starts, stops = rank.starts[others], rank.stops[others]
    lives = [
        (int(starts[where].min()), int(stops[where].max()))
        for _, where in grouped(rank.spans["thread"][others])
    ]
    return _most_at_once(*np.array(lives, np.int64).reshape(-1, 2).T)


def _most_at_once(starts: Times, stops: Times) -> int:
    ends = np.concatenate((starts, stops))
    steps = np.repeat(np.array([1, -1]), len(starts))
    order = np.lexsort((steps, ends))
    return int(np.cumsum(steps[order]).max(initial=0))


def _at_once(rank: Rank, attribution: Attribution) -> float:
    awaited = union(attribution.exposed.get(each, Intervals()) for each in READERS)
    if not len(awaited):
        return 0.0
    of_readers = np.isin(rank.categories, READERS) & ~rank.on_device
    starts, stops = rank.starts[of_readers], rank.stops[of_readers]
    done_by = [
        amounts_before(times, starts, stops, stops - starts)
        for times in (awaited.starts, awaited.stops)
    ]
    return float((done_by[1] - done_by[0]).sum()) / awaited.total


def _ahead(rank: Rank) -> int:
    waiting = rank.categories == Category.delay
    return _most_at_once(rank.starts[waiting], rank.stops[waiting])


def _steps(rank: Rank, attribution: Attribution) -> StepTimes:
    starts, stops = rank.edges()
    exposed = {
        category: (given.before(stops) - given.before(starts)) / SECOND
        for category, given in attribution.exposed.items()
    }
    return StepTimes(
        epoch=np.array([step.epoch for step in rank.steps], np.int64),
        number=np.array([step.number for step in rank.steps], np.int64),
        seconds=(stops - starts) / SECOND,
        exposed=exposed,
        making=(attribution.making.before(stops) - attribution.making.before(starts)) / SECOND,
        reading=_reading(rank),
    )


def _reading(rank: Rank) -> NDArray[np.float64]:
    """Seconds of threads for the samples of each step, where spans tell them; else in its time."""
    of_readers = np.isin(rank.categories, READERS) & ~rank.on_device
    seconds = (rank.stops - rank.starts)[of_readers] / SECOND
    steps = rank.steps
    found = np.zeros(len(steps))
    if not len(steps) or not len(seconds):
        return found
    epochs = rank.spans["epoch"][of_readers]
    middles = (rank.starts + rank.stops)[of_readers] // 2
    stops = np.array([step.stop for step in steps], np.int64)
    by_time = np.minimum(np.searchsorted(stops, middles), len(steps) - 1)
    of_epoch = np.array([step.epoch for step in steps], np.int64)
    by_epoch = np.where(epochs >= 0, epochs, of_epoch[by_time])
    # Readers run ahead: the work of an epoch is spread evenly over its steps.
    numbers, step_of, counts = np.unique(of_epoch, return_inverse=True, return_counts=True)
    at = np.minimum(np.searchsorted(numbers, by_epoch), len(numbers) - 1)
    known = numbers[at] == by_epoch
    sums = np.bincount(at[known], weights=seconds[known], minlength=len(numbers))
    shares: NDArray[np.float64] = (sums / counts)[step_of]
    return shares
