"""The time of a GPU on the clock of the host, with events that a test lets happen."""

import numpy as np
import pytest

from hyperslab.comm.device_spans import MOST_PENDING, DeviceSpans
from hyperslab.trace import Category, Flag, load_trace
from hyperslab.trace.recorder import Clock, Recorder

MS = 1_000_000


class Device:
    """Runs what is launched one after the other; its clock began at another time."""

    def __init__(self):
        self.host = 50 * MS
        self.free_at = 0
        """By the host's clock, in nanoseconds."""

    def launch(self, nanoseconds):
        self.free_at = max(self.free_at, self.host) + nanoseconds

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self._device = device

    def record(self):
        self.at = max(self._device.free_at, self._device.host)

    def query(self):
        return self.at <= self._device.host

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return float(np.float32((other.at - self.at) / MS))


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def spans(device, tmp_path):
    return DeviceSpans(Recorder(tmp_path, clock=Clock(now=lambda: device.host)), device.event)


def record(spans, device, duration, launch=0.1, name="work"):
    """Launches work, which takes the host ``launch`` of a millisecond."""
    mark = spans.mark()
    began = max(device.free_at, device.host)
    device.launch(round(duration * MS))
    device.host += round(launch * MS)
    spans.add("gpu compute", Category.compute, name, mark)
    return began, round(duration * MS)


def trace_of(spans, folder):
    spans.collect()
    spans.recorder.stop()
    return load_trace(folder)


def test_spans_come_when_the_gpu_has_got_there_and_nobody_waits(device, spans, tmp_path):
    expected = [record(spans, device, 5) for _ in range(4)]
    device.host += 11 * MS
    spans.collect()
    assert len(spans._pending) == 2
    device.host += 100 * MS
    trace = trace_of(spans, tmp_path)
    assert (trace.of(Category.compute)["flags"] == Flag.device).all()
    found = trace.spans
    assert found["duration"].tolist() == [5 * MS] * 4
    unix = int(found["start"][0]) - expected[0][0]
    assert (found["start"] - unix).tolist() == [start for start, _ in expected]


def test_a_gpu_that_was_busy_at_first_is_put_where_it_must_have_been(device, tmp_path):
    """The first event comes 30 ms late, and nobody knows, until the GPU is idle again."""
    device.launch(30 * MS)
    spans = DeviceSpans(Recorder(tmp_path, clock=Clock(now=lambda: device.host)), device.event)
    record(spans, device, 2)
    device.host += 40 * MS
    start, _ = record(spans, device, 2, name="idle before")
    device.host += 40 * MS
    late = trace_of(spans, tmp_path).spans[-1]
    assert int(late["start"]) - spans.recorder.clock.unix() + device.host == pytest.approx(
        start, abs=10 * MS
    )
    assert spans._base_time == 80 * MS


def test_hours_are_told_as_exactly_as_seconds(device, spans, tmp_path):
    expected = []
    for _ in range(3000):
        expected.append(record(spans, device, 7.125))
        device.host += 4000 * MS
    found = trace_of(spans, tmp_path).spans
    starts = found["start"] - int(found["start"][0])
    true = np.array([start for start, _ in expected])
    assert np.abs(starts - (true - true[0])).max() < 0.5 * MS  # in 3.3 hours
    assert np.abs(found["duration"] - 7.125 * MS).max() < 1000


def test_a_gpu_that_hangs_takes_no_more_memory(device, spans):
    device.launch(10**15)
    for _ in range(MOST_PENDING + 5):
        record(spans, device, 1)
    assert len(spans._pending) == MOST_PENDING
