"""What a profiler's trace tells of convolutions that hide their halo exchange."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gpu.halo_step import POST, STEP, WAIT

CONVOLUTIONS = {"HaloConv": "forward", "HaloConvBackward": "backward"}
ON_GPU = {"kernel": "kernel", "gpu_memset": "kernel", "gpu_memcpy": "copy"}
MOVING = ("move_boxes", "copy", "Cat", "fill", "Memset")
"""Parts of the names of kernels that only move numbers."""


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    stop: float
    kind: str = ""
    thread: object = None
    launched: float = 0.0
    """When the host asked for it. Times are in microseconds."""

    def holds(self, time: float) -> bool:
        return self.start <= time < self.stop

    @property
    def is_exchange(self) -> bool:
        return self.kind == "copy" or "nccl" in self.name.lower()


@dataclass(frozen=True)
class Convolution:
    """One pass of a convolution with a halo, by what the host launched when."""

    passing: str
    before: list[Span]
    post: list[Span]
    interior: list[Span]
    wait: list[Span]
    after: list[Span]
    host_post: Span
    host_wait: Span

    @property
    def exchange(self) -> tuple[float, float]:
        """From the first byte that leaves to the last that arrives."""
        moves = [span for span in (*self.post, *self.wait) if span.is_exchange]
        if not moves:  # on CPUs
            return self.host_post.start, self.host_wait.stop
        return moves[0].start, max(span.stop for span in moves)

    @property
    def hidden(self) -> float:
        """The part of the exchange during which this rank computes."""
        start, stop = self.exchange
        kernels = [s for s in self._computing() if s.stop > start and s.start < stop]
        return covered(((s.start, s.stop) for s in kernels), start, stop) / (stop - start)

    @property
    def in_order(self) -> bool:
        """Packed, sent while the interior is computed, then unpacked for the border."""
        packed = [span for span in self.post if not span.is_exchange]
        start, stop = self.exchange
        leaves_packed = not packed or packed[-1].stop <= start + 1 or not self.wait
        beside = bool(self.interior) and self.interior[0].start < stop
        arrived = not self.wait or not self.after or self.after[0].start >= self.wait[-1].stop - 1
        return leaves_packed and beside and arrived

    def report(self) -> dict:
        start, stop = self.exchange
        return {
            "pass": self.passing,
            "interior_us": extent(self.interior),
            "exchange_us": stop - start,
            "hidden": self.hidden,
            "in_order": self.in_order,
            "pack_launches": sum(not span.is_exchange for span in self.post),
            "unpack_launches": sum(any(m in s.name for m in MOVING) for s in self.after),
            "other_launches": len(self.before) + len(self.interior) + len(self.after),
        }

    def _computing(self) -> list[Span]:
        every = (*self.before, *self.post, *self.interior, *self.after)
        return [span for span in every if not span.is_exchange]


@dataclass(frozen=True)
class Timeline:
    """The last step of a trace."""

    step: Span
    convolutions: list[Convolution]
    work: list[Span]
    """All that ran on the device."""
    waits: list[Span]
    """For other ranks, by the host."""
    host_syncs: dict[str, int]
    """How often the host waited for the GPU, by the name of the call; in the model's threads."""


def read_timeline(path: Path) -> Timeline:
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    named = [_span(e) for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    step = [span for span in named if span.name == STEP][-1]
    inside = sorted((s for s in named if step.holds(s.start)), key=lambda s: s.start)
    work = sorted(_device_work(events, inside), key=lambda s: s.launched)
    work = [span for span in work if step.holds(span.launched)]
    ops = [span for span in inside if span.name in CONVOLUTIONS]
    threads = {span.thread for span in (step, *ops)}
    syncs = [
        event["name"]
        for event in events
        if event.get("cat", "").startswith("cuda_") and "Synchronize" in event["name"]
        and event["tid"] in threads and step.holds(event["ts"])
    ]  # fmt: skip
    return Timeline(
        step,
        list(filter(None, (_convolution(op, inside, work) for op in ops))),
        work,
        [span for span in inside if span.name == WAIT],
        {name: syncs.count(name) for name in sorted(set(syncs))},
    )


def _span(event: dict) -> Span:
    return Span(event["name"], event["ts"], event["ts"] + event["dur"], thread=event["tid"])


def _device_work(events: Sequence[dict], host: Sequence[Span]) -> list[Span]:
    """What ran on the GPU; without one, the outermost operators."""
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found = []
    for event in events:
        kind = ON_GPU.get(event.get("cat", ""))
        launch = launches.get(event.get("args", {}).get("correlation"))
        if kind and launch:
            start, stop = event["ts"], event["ts"] + event["dur"]
            found.append(Span(event["name"], start, stop, kind, launch["tid"], launch["ts"]))
    return found or [
        Span(s.name, s.start, s.stop, "kernel", s.thread, s.start) for s in _outermost(host)
    ]


def _outermost(spans: Iterable[Span]) -> list[Span]:
    last: dict[object, float] = {}
    found = []
    for span in spans:
        if span.name.startswith("aten::") and span.start >= last.get(span.thread, 0.0):
            last[span.thread] = span.stop
            found.append(span)
    return found


def _convolution(op: Span, host: Sequence[Span], work: Sequence[Span]) -> Convolution | None:
    """None where nothing is sent, as in the backward pass of the first convolution."""
    mine = [s for s in work if s.thread == op.thread and op.holds(s.launched)]
    posts, waits = (
        [s for s in host if s.name == name and s.thread == op.thread and op.holds(s.start)]
        for name in (POST, WAIT)
    )
    if not posts or not waits:
        return None
    post, wait = posts[0], waits[0]
    edges = [op.start, post.start, post.stop, wait.start, wait.stop, op.stop]
    parts = [[s for s in mine if first <= s.launched < last] for first, last in pairwise(edges)]
    return Convolution(CONVOLUTIONS[op.name], *parts, post, wait)


def extent(spans: Sequence[Span]) -> float:
    return max((s.stop for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)


def covered(parts: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """How much of ``start`` to ``stop`` lies in any of ``parts``."""
    total, reached = 0.0, start
    for first, last in sorted(parts):
        first, last = max(first, reached), min(last, stop)
        total += max(0.0, last - first)
        reached = max(reached, last)
    return total
