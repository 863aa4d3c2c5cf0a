"""Time of a GPU in a trace: told by events on its streams, for which no host ever waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hyperslab.trace import Category, Flag, active
from hyperslab.trace.recorder import Place, Recorder

MOST_PENDING = 4096
"""Spans that the GPU has not reached yet; those after them are left out."""
CHAIN_MS = 1000.0
"""Events tell milliseconds from one to another in 32 bits: over longer times too coarsely."""


class Event(Protocol):
    """As ``torch.cuda.Event`` with ``enable_timing``."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, other: Any) -> float: ...


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the work of a stream."""

    event: Event
    asked: int
    """When the host asked for it, before which the GPU cannot have been there."""


@dataclass(frozen=True, slots=True)
class _Pending:
    lane: str
    category: Category
    name: str
    first: Mark
    last: Mark
    nbytes: int
    flags: int
    layer: int
    place: Place


class DeviceSpans:
    """The spans of one GPU, put on the recorder's clock.

    That takes no waiting either: the GPU reaches an event after the host asked for it and before
    the host sees that it did, and each event narrows down what lies between the two clocks.
    """

    def __init__(self, recorder: Recorder, make_event: Callable[[], Event]) -> None:
        self.recorder, self._make_event = recorder, make_event
        self._lock = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._base = self.mark()
        self._base_time = self._base.asked

    def mark(self) -> Mark:
        """Where the current stream will be when it has done what was launched until now."""
        event = self._make_event()
        asked = self.recorder.now()
        event.record()
        return Mark(event, asked)

    def add(
        self,
        lane: str,
        category: Category,
        name: str,
        first: Mark,
        nbytes: int = 0,
        *,
        exposed: bool = False,
    ) -> None:
        """A span from ``first`` until what was launched by now is done."""
        found = self.recorder.place()
        place = Place(found.epoch, found.step, found.sample)
        layer = self.recorder.lane_of_thread().layer
        flags = int(Flag.device | Flag.exposed if exposed else Flag.device)
        pending = _Pending(lane, category, name, first, self.mark(), nbytes, flags, layer, place)
        with self._lock:
            if len(self._pending) < MOST_PENDING:
                self._pending.append(pending)
        self.collect()

    def collect(self) -> None:
        """Records the spans whose end the GPU has reached."""
        with self._lock:
            if not self._base.event.query():
                return
            while self._pending and self._pending[0].last.event.query():
                self._record(self._pending.popleft())

    def _record(self, span: _Pending) -> None:
        start, stop = self._time(span.first), self._time(span.last)
        late = stop - self.recorder.now()
        if late > 0:  # it was there by now
            start, stop, self._base_time = start - late, stop - late, self._base_time - late
        self.recorder.add_to(
            span.lane,
            span.category,
            span.name,
            start,
            stop,
            nbytes=span.nbytes,
            flags=span.flags,
            place=span.place,
            layer=span.layer,
            apart=span.category in (Category.halo, Category.all_reduce),
        )
        if self._base.event.elapsed_time(span.last.event) > CHAIN_MS:
            self._base, self._base_time = span.last, stop

    def _time(self, mark: Mark) -> int:
        found = self._base_time + round(self._base.event.elapsed_time(mark.event) * 1e6)
        if found < mark.asked:  # the GPU's clock is ahead of what was thought
            self._base_time += mark.asked - found
            return mark.asked
        return found


_spans: dict[torch.device, DeviceSpans] = {}


def device_spans(device: torch.device) -> DeviceSpans | None:
    """Those of a GPU, while something is recorded; none while a CUDA graph is."""
    recorder = active.recorder
    if recorder is None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    found = _spans.get(device)
    if found is None or found.recorder is not recorder:
        found = _spans[device] = DeviceSpans(recorder, lambda: _CudaEvent(device))
    return found


class _CudaEvent:
    """Of the current stream of ``device``, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def elapsed_time(self, other: _CudaEvent) -> float:
        return float(self._event.elapsed_time(other._event))


def collect_all() -> None:
    """Records what GPUs have done by now; whoever wants all of it waits for them before."""
    for spans in _spans.values():
        if spans.recorder is active.recorder:
            spans.collect()


class Launched:
    """A span around work that is launched; of the GPU's own time too, where ``device`` is one.

    On a GPU the host's own time is recorded as *other*: it computes nothing meanwhile.
    """

    __slots__ = ("_device", "_mark", "_recorder", "_spans", "_start", "_what")

    def __init__(
        self,
        recorder: Recorder,
        lane: str,
        category: Category,
        name: str,
        device: torch.device,
        nbytes: int = 0,
    ) -> None:
        self._recorder, self._device = recorder, device
        self._what = lane, category, name, nbytes

    def __enter__(self) -> Launched:
        self._spans = device_spans(self._device)
        self._mark = None if self._spans is None else self._spans.mark()
        self._start = self._recorder.now()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recorder, (lane, category, name, nbytes) = self._recorder, self._what
        if self._spans is None or self._mark is None:
            recorder.add(category, name, self._start, recorder.now(), nbytes)
            return
        recorder.add(Category.other, f"launch {name}", self._start, recorder.now())
        self._spans.add(lane, category, name, self._mark, nbytes)


def launched(
    lane: str, category: Category, name: str, device: torch.device, nbytes: int = 0
) -> Launched | active.Idle:
    """A ``Launched``, if something is recorded."""
    if active.recorder is None:
        return active.IDLE
    return Launched(active.recorder, lane, category, name, device, nbytes)
