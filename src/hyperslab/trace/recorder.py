"""The recorder of a process: spans of its threads, on their way to its trace file.

A thread packs its spans into memory of its own, which nobody else writes. A thread of the
recorder's appends them to the file several times a second, so that a process which is killed loses
no more than that. Who fills its memory sooner does so itself: nothing grows, and nothing is lost.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from hyperslab.trace.file import SUFFIX, TraceFile
from hyperslab.trace.span import SPAN, Category, Thread, Tier

_log = logging.getLogger("hyperslab")

CAPACITY = 4096
"""Spans that a thread holds."""
FIRST_DRAIN_SECONDS, DRAIN_SECONDS = 0.05, 0.25
"""After the first span, and from then on: what a process that is killed loses at most."""
MOST_STRINGS = 1 << 18
"""Names that are told apart; those after them share one."""
OTHERS = "(one of many names)"
MOST_APART = 16
LANE_TID = 1 << 40
"""Threads numbered from here on are none of the system's: what a GPU or a queue does."""

_PACK = Struct("<qqqqiiIIIIBBH").pack_into
_NBYTES = CAPACITY * SPAN.itemsize
_OF_LOOP = ("step", "epoch")
_BOUNDS = {
    "nbytes": (0, (1 << 63) - 1),
    "sample": (-1, (1 << 63) - 1),
    "step": (-1, (1 << 31) - 1),
    "epoch": (-1, (1 << 31) - 1),
    "category": (0, len(Category) - 1),
    "tier": (0, len(Tier) - 1),
    "flags": (0, (1 << 16) - 1),
}
"""The least and the most that a span has room for."""


_local_folders: tuple[str, ...] = ()


def note_local(folder: Path) -> None:
    """Says that what lies in ``folder`` is on a disk of this node's own."""
    global _local_folders
    if (prefix := f"{folder}{os.sep}") not in _local_folders:
        _local_folders += (prefix,)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What spans are timed by, and what else its times can be compared with."""

    now: Callable[[], int] = time.perf_counter_ns
    unix: Callable[[], int] = time.time_ns
    name: str = ""
    """Equal where processes share it: those of one host, since it was started."""
    host: str = ""

    @classmethod
    def of_host(cls) -> Clock:
        host = platform.node()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = f"pid {os.getpid()}"
        return cls(name=f"{host} {boot}", host=host)


class Place:
    """Where in a run a thread is; -1 where that is not known."""

    __slots__ = ("epoch", "sample", "step")

    def __init__(self, epoch: int = -1, step: int = -1, sample: int = -1) -> None:
        self.epoch, self.step, self.sample = epoch, step, sample


class Lane:
    """The spans of one thread, or of what is told apart like one, until they are written."""

    __slots__ = ("at", "data", "drained", "layer", "number", "owner", "place")

    def __init__(self, number: int, place: Place, owner: threading.Thread | None) -> None:
        self.data = bytearray(_NBYTES)
        self.at = self.drained = 0
        self.number, self.owner = number, owner
        self.place = place
        self.layer = 0
        """The part of a model that the thread is in."""


class Recorder:
    """Writes the spans of this process to a new file in ``folder``, which is made with the first.

    ``add`` may be called from any thread. Whatever happens to the file, it raises nothing: there is
    one warning, and no more is recorded.
    """

    def __init__(
        self, folder: Path, *, rank: int = 0, is_detailed: bool = False, clock: Clock | None = None
    ) -> None:
        self.folder, self.rank, self.is_detailed = folder, rank, is_detailed
        self.clock = clock or Clock.of_host()
        self.now = self.clock.now
        self.loop = Place()
        """Where the main loop is, and with it all threads that have no place of their own."""
        self.main_loop: object = None
        """Who tells of steps."""
        self.is_evaluating = self.is_awaited = False
        """Whether loops do not train, and whether somebody tells of waiting for the next batch."""
        self.next_step = 0
        self._local = threading.local()
        self._lock = threading.RLock()
        self._lanes: list[Lane] = []
        self._named: dict[str, Lane] = {}
        self._stops: dict[str, int] = {}
        self._numbers: dict[str, int] = {"": 0}
        self._new_strings: list[str] = []
        self._new_threads: list[Thread] = []
        self._num_threads = 0
        self._offsets: list[tuple[int, int]] = []
        self._file: TraceFile | None = None
        self._told_rank = rank
        self._is_draining = self._has_ended = self._has_warned = False
        self._wake = threading.Event()
        self._drainer: threading.Thread | None = None

    # Recording

    def add(
        self,
        category: int,
        name: str,
        start: int,
        stop: int,
        nbytes: int = 0,
        tier: int = 0,
        sample: int = -1,
        flags: int = 0,
        lane: Lane | None = None,
    ) -> None:
        """A span of the calling thread, by times of ``now``; its place tells where in the run."""
        if lane is None:
            try:
                lane = self._local.lane
            except AttributeError:
                lane = self.lane_of_thread()
        try:
            number = self._numbers[name]
        except (KeyError, TypeError):
            number = self._number_of(name)
        place, at = lane.place, lane.at
        try:
            _PACK(
                lane.data,
                at,
                start,
                stop - start,
                nbytes,
                place.sample if sample < 0 else sample,
                place.step,
                place.epoch,
                number,
                lane.layer,
                lane.number,
                0,
                category,
                tier,
                flags,
            )
        except Exception:  # noqa: BLE001 - values of users' own, of any kind, stop no program
            of_loop = [self._whole(name, each, getattr(place, each), -1) for each in _OF_LOOP]
            _PACK(
                lane.data,
                at,
                start,
                stop - start,
                self._whole(name, "nbytes", nbytes, 0),
                self._whole(name, "sample", sample, place.sample),
                *of_loop,
                number,
                lane.layer,
                lane.number,
                0,
                self._whole(name, "category", category, Category.user),
                self._whole(name, "tier", tier, Tier.none),
                self._whole(name, "flags", flags, 0),
            )
        lane.at = at = at + SPAN.itemsize
        if at == _NBYTES:
            self._make_room(lane)

    def add_to(
        self,
        thread: str,
        category: int,
        name: str,
        start: int,
        stop: int,
        *,
        nbytes: int = 0,
        tier: int = 0,
        flags: int = 0,
        place: Place | None = None,
        layer: int = 0,
        apart: bool = False,
    ) -> None:
        """A span of no thread of the system's: of ``thread``, such as a stream of a GPU.

        Those that may overlap are kept ``apart``, on further threads as many as it takes.
        """
        with self._lock:
            name_of_lane, number = thread, 1
            while apart and self._stops.get(name_of_lane, start) > start and number < MOST_APART:
                name_of_lane, number = f"{thread} {number}", number + 1
            self._stops[name_of_lane] = stop
            lane = self._named.get(name_of_lane)
            if lane is None:
                lane = self._named[name_of_lane] = self._new_lane(name_of_lane, None)
            lane.place, lane.layer = place or self.place(), layer
            self.add(category, name, start, stop, nbytes, tier, -1, flags, lane)

    def lane_of_thread(self) -> Lane:
        """That of the calling thread."""
        lane: Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            with self._lock:
                thread = threading.current_thread()
                lane = self._new_lane(thread.name, thread)
            self._local.lane = lane
        return lane

    def place(self) -> Place:
        """Where the calling thread is."""
        lane: Lane | None = getattr(self._local, "lane", None)
        return self.loop if lane is None else lane.place

    def number_of(self, name: str) -> int:
        """That stands for ``name`` in spans."""
        found = self._numbers.get(name)
        return self._number_of(name) if found is None else found

    def tier_of(self, path: str) -> Tier:
        """Whether a file lies on a disk of this node, as far as it was told."""
        return Tier.disk if _local_folders and path.startswith(_local_folders) else Tier.file

    def note_offset(self, at: int, behind: int) -> None:
        """Says what ``now`` was behind rank 0's when it was ``at``."""
        with self._lock:
            self._offsets.append((at, behind))

    def set_rank(self, rank: int) -> None:
        """Says which rank this process is, where it was not known."""
        self.rank = rank

    def _whole(self, name: object, field: str, value: Any, nothing: int) -> int:
        """``value`` as a number that has room in a span; ``nothing`` and a warning if it is none.

        The calling thread's span has ended: whatever is wrong with it, nothing is raised.
        """
        least, most = _BOUNDS[field]
        try:
            return min(max(int(value), least), most)
        except Exception:  # noqa: BLE001 - whatever the value raises
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "the span %s is recorded without its %s: a %s is no whole number (other "
                    "spans like this are not told of)",
                    name,
                    field,
                    type(value).__name__,
                )
            return nothing

    # Writing

    def flush(self) -> None:
        """Hands all spans so far to the system."""
        with self._lock:
            if self._is_draining:  # called by what interrupted it, in this thread
                return
            self._is_draining = True
            try:
                self._drain()
            except OSError as error:
                self._end()
                _log.warning(
                    "the trace of this run ends here, and the run goes on: %s: %s",
                    self.folder,
                    error.strerror or error,
                )
            finally:
                self._is_draining = False

    def stop(self) -> None:
        """Writes what there is; what comes later is dropped."""
        self.flush()
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """In a forked child: the file is the parent's, and so is what was not written yet."""
        self._has_ended = True

    def _end(self) -> None:
        self._has_ended = True
        self._wake.set()
        if self._file is not None:
            self._file.close()

    def _make_room(self, lane: Lane) -> None:
        if not self._has_ended:
            self.flush()
        lane.at = lane.drained = 0

    def _drain(self) -> None:
        if self._has_ended:
            return
        full = [(lane, lane.at) for lane in self._lanes if lane.at > lane.drained]
        if full:
            file = self._file = self._file or self._begin_file()
            self._tell_news(file)
            for lane, stop in full:
                part = memoryview(lane.data)[lane.drained : stop]
                file.spans(np.frombuffer(part, SPAN))
                lane.drained = stop
        self._lanes = [lane for lane in self._lanes if not _is_over(lane)]

    def _begin_file(self) -> TraceFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = _new_file(self.folder, self.rank)
        facts: dict[str, Any] = {"rank": self.rank, "pid": os.getpid(), "host": self.clock.host}
        facts |= {"clock": self.clock.name, "clocks": [(self.clock.now(), self.clock.unix())]}
        file.facts(facts | {"offsets": [], "program": " ".join(sys.argv)})
        return file

    def _tell_news(self, file: TraceFile) -> None:
        """What spans refer to must be there before them."""
        if self._told_rank != self.rank:
            self._told_rank = self.rank
            file.facts({"rank": self.rank})
        if self._offsets:
            offsets, self._offsets = self._offsets, []
            file.facts({"offsets": offsets})
        if self._new_strings:
            strings, self._new_strings = self._new_strings, []
            file.strings(strings)
        if self._new_threads:
            threads, self._new_threads = self._new_threads, []
            file.threads(threads)

    def _new_lane(self, name: str, owner: threading.Thread | None) -> Lane:
        lane = Lane(self._num_threads, self.loop, owner)
        tid = LANE_TID + lane.number if owner is None else threading.get_native_id()
        self._num_threads += 1
        self._new_threads.append(Thread(tid=tid, name=name))
        if self._has_ended:
            return lane
        self._lanes.append(lane)
        if self._drainer is None:
            self._drainer = threading.Thread(target=self._run, name="hyperslab-trace", daemon=True)
            self._drainer.start()
        return lane

    def _number_of(self, name: object) -> int:
        name = name if isinstance(name, str) else str(name)
        with self._lock:
            if (found := self._numbers.get(name)) is not None:
                return found
            if len(self._numbers) >= MOST_STRINGS and name != OTHERS:
                return self._number_of(OTHERS)
            # What is told to the file next comes before the number is known to others.
            self._new_strings.append(name)
            number = self._numbers[name] = len(self._numbers)
            return number

    def _run(self) -> None:
        seconds = FIRST_DRAIN_SECONDS
        while not self._has_ended:
            self._wake.wait(seconds)
            self.flush()
            seconds = min(2 * seconds, DRAIN_SECONDS)


def _is_over(lane: Lane) -> bool:
    """Whether a lane's thread has ended, and all of its spans are written."""
    return lane.owner is not None and not lane.owner.is_alive() and lane.at == lane.drained


def _new_file(folder: Path, rank: int) -> TraceFile:
    """The next for a rank: one that went on, or was forked, has some already."""
    number = 0
    while True:
        more = f".{number}" if number else ""
        try:
            return TraceFile(folder / f"rank{rank:05}{more}{SUFFIX}")
        except FileExistsError:
            number += 1
