"""What does it cost to record a trace?

    python benchmarks/trace.py

Prints the time of one span: as the package itself records it, as ``with hs.span("name"):``, and of
the latter where nothing is recorded. Then what the coarse level adds to a training step, whose
samples come from a loader: as many spans are recorded however large they are, so the time that is
added is measured where there is little else, with CosmoFlow on 4 x 8^3, and told as a share of its
step on 4 x 64^3, the smallest of the presets. Epochs with a trace and without take turns.

Shown are times that a quarter of all keeps below, as other work on the machine only ever makes
things slower: on the wall, and of processors, of all threads together. "counted" is the number of
spans times the cost of one.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.models import CosmoFlow
from hyperslab.trace import Category, active, load_trace

SMALL, USUAL = 8, 64
NUM_SAMPLES = 8
BATCH_SIZE = 2
STEPS = NUM_SAMPLES // BATCH_SIZE


def span_times(repeats):
    """Nanoseconds of one span, each way."""
    ways = {"internal": internal_spans, "with hs.span": user_spans}
    samples = {name: [] for name in (*ways, "nothing recorded")}
    for _ in range(repeats):
        samples["nothing recorded"].append(timed(user_spans))
        with tempfile.TemporaryDirectory() as folder, hs.trace.recording(folder):
            for name, way in ways.items():
                samples[name].append(timed(way))
    return {name: statistics.quantiles(times)[0] for name, times in samples.items()}


def timed(way, num=2000):
    start = time.perf_counter()
    way(num)
    return (time.perf_counter() - start) / num * 1e9


def internal_spans(num):
    recorder, category = active.recorder, Category.read
    add, now = recorder.add, recorder.now
    for _ in range(num):
        start = now()
        add(category, "name", start, now())


def user_spans(num):
    for _ in range(num):
        with hs.span("name"):
            pass


class Training:
    """Epochs of CosmoFlow on cubes of ``size``."""

    def __init__(self, size, folder):
        path = Path(folder, f"{size}.npy")
        rng = np.random.default_rng(0)
        np.save(path, rng.integers(0, 99, (NUM_SAMPLES, 4, size, size, size), np.int16))
        mesh = hs.init(device="cpu")
        self.model = hs.parallelize(CosmoFlow(size, base_channels=size // 4), mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        data = hs.open(path, axes="NCDHW")
        self.loader = hs.Loader(data, mesh, batch_size=BATCH_SIZE, dtype=torch.float32)

    def epoch(self):
        """Seconds of a step of it, on the wall and of processors."""
        wall, cpu = time.perf_counter(), time.process_time()
        for x in self.loader:
            F.mse_loss(self.model(x), torch.zeros(BATCH_SIZE, 4)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS


def step_times(num):
    """Microseconds of a step, and those that the coarse level adds, over ``num`` turns."""
    with tempfile.TemporaryDirectory() as folder:
        small, usual = Training(SMALL, folder), Training(USUAL, folder)
        usual_times = [usual.epoch() for _ in range(max(3, num // 20))]
        usual.loader.close()
        small.epoch()
        hs.trace.start(folder)
        recorder = active.recorder
        times = {None: [], recorder: []}
        for turn in range(num):
            for active.recorder in (None, recorder) if turn % 2 else (recorder, None):
                times[active.recorder].append(small.epoch())
        active.recorder = recorder
        hs.trace.stop()
        small.loader.close()
        num_spans = len(load_trace(folder)) / num / STEPS
    off, on, usual = map(fast, (times[None], times[recorder], usual_times))
    return {
        kind: {"step": usual[place] * 1e6, "added": (on[place] - off[place]) * 1e6}
        for place, kind in enumerate(("wall", "cpu"))
    } | {"spans": num_spans}


def fast(times):
    """The times of each kind that a quarter keeps below."""
    return [statistics.quantiles(each)[0] for each in zip(*times, strict=True)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="60 turns, some 20 s")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    spans = span_times(20 if options.quick else 60)
    step = step_times(60 if options.quick else options.turns)
    for kind in ("wall", "cpu"):
        step[kind]["share"] = step[kind]["added"] / step[kind]["step"]
    step["counted"] = step["spans"] * spans["with hs.span"] / 1e3 / step["cpu"]["step"]
    report = {"span_ns": spans, "step_us": step}
    if options.json:
        print(json.dumps(report, indent=1))
        return
    for name, time_ns in spans.items():
        print(f"one span, {name:42} {time_ns:9.0f} ns")
    for kind, name in (("wall", "on the wall"), ("cpu", "of processors")):
        row = step[kind]
        print(f"a step, {name:44} {row['step']:9.0f} us")
        print(f"added to it {row['added']:50.1f} us {row['share']:9.3%}")
    print(f"spans of a step, counted {step['spans']:36.1f} {step['counted']:12.3%}")


def bars(report):
    """What is measured, its value, how it must compare and with what."""
    spans, step = report["span_ns"], report["step_us"]
    return [
        ("one span, ns", spans["internal"], "<=", 1000),
        ("one span, with hs.span, ns", spans["with hs.span"], "<=", 1000),
        ("with hs.span, nothing recorded, ns", spans["nothing recorded"], "<=", 300),
        ("coarse, share of a step", step["cpu"]["share"], "<=", 0.005, step["counted"]),
    ]


if __name__ == "__main__":
    main()
