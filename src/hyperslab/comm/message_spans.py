"""Messages between ranks in a trace: how long they were on their way, and how long awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from hyperslab.comm.device_spans import DeviceSpans, Mark, device_spans
from hyperslab.trace import Category, Flag, active
from hyperslab.trace.recorder import Recorder

T_co = TypeVar("T_co", covariant=True)


class Awaited(Protocol[T_co]):
    """What was begun, and gives its result when it is waited for."""

    def wait(self) -> T_co: ...


T = TypeVar("T")


def recorded(
    begin: Callable[[], Awaited[T]],
    category: Category,
    name: str,
    nbytes: int,
    device: torch.device,
) -> Awaited[T]:
    """What ``begin`` posts, so that a trace tells of it when it is waited for.

    A detailed one tells when a GPU came to both, too.
    """
    recorder = active.recorder
    if recorder is None:
        return begin()
    what = _What(recorder, category, name, nbytes)
    spans = device_spans(device) if recorder.is_detailed else None
    if spans is None:
        posted = recorder.now()
        return _InFlight(begin(), what, posted)
    mark = spans.mark()
    return _InFlightOnDevice(_InFlight(begin(), what, mark.asked), what, spans, mark)


class _What(NamedTuple):
    recorder: Recorder
    category: Category
    name: str
    nbytes: int


class _InFlight(Generic[T]):
    """Messages that were posted.

    They are a span of their own, from when they were posted until they have arrived; the time that
    somebody waits for them is another one, of the thread that waits.
    """

    __slots__ = ("_pending", "_posted", "_what")

    def __init__(self, pending: Awaited[T], what: _What, posted: int) -> None:
        self._pending, self._what, self._posted = pending, what, posted

    def wait(self) -> T:
        recorder, category, name, nbytes = self._what
        start = recorder.now()
        found = self._pending.wait()
        stop = recorder.now()
        recorder.add(category, f"wait for {name}", start, stop, nbytes, flags=_EXPOSED)
        lane, layer = f"{category.name} messages", recorder.lane_of_thread().layer
        recorder.add_to(
            lane, category, name, self._posted, stop, nbytes=nbytes, layer=layer, apart=True
        )
        return found


class _InFlightOnDevice(Generic[T]):
    """The same, and what a stream does meanwhile."""

    __slots__ = ("_mark", "_pending", "_spans", "_what")

    def __init__(self, pending: Awaited[T], what: _What, spans: DeviceSpans, mark: Mark) -> None:
        self._pending, self._what, self._spans, self._mark = pending, what, spans, mark

    def wait(self) -> T:
        _, category, name, nbytes = self._what
        first = self._spans.mark()
        found = self._pending.wait()
        self._spans.add("gpu waits", category, f"wait for {name}", first, nbytes, exposed=True)
        self._spans.add(f"gpu {category.name}", category, name, self._mark, nbytes)
        return found


_EXPOSED = int(Flag.exposed)
