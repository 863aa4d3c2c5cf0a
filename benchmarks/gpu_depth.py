"""What do depth-first tiles cost on one GPU, and what memory do they save?

    python benchmarks/gpu_depth.py --folder out
    python benchmarks/gpu_depth.py --profile        (also the kernels of one row)
    python benchmarks/gpu_depth.py --small          (tiny networks, also without a GPU)

A step is a forward and a backward pass of CosmoFlow in bf16, channels last. Tiles go through the
named blocks, are computed again in the backward pass, and their largest tensor has 2^n elements.
`auto` is what `parallelize` does by itself: where as much memory is taken away as a row says, it
picks blocks. `ms` are medians between CUDA events, `host ms` end when all is given to the GPU:
where both are alike, the GPU waits for the host. `GiB` is the peak, the batch included. `error` is
the larger relative difference of loss and first gradient from the row of the same size without
tiles. `first s` is the first step, in which kernels are compiled. depth.json and depth.md in
--folder are written again after every row.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from gpu.cases import Case, Options, cosmoflow
from gpu.clock import device_times, host_times, synchronize
from gpu.record import NO_TIME, Found, Record
from gpu.trial import Evidence, Setting, Trial

from hyperslab.kernels import fused
from hyperslab.nn.depth_first import memory_watch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST = Setting(channels_last=True, benchmark=False)
GIB = 2**30


class Way(NamedTuple):
    """A way to compute a step."""

    name: str
    case: Case
    ours: Options
    left_gib: float | None = None
    """What is left of the memory beside the batch; None: all."""


def make_ways(*, small: bool) -> list[Way]:
    """What matters most first."""
    if small:
        narrow = {"precision": "fp32", "width": 2}
        cases, powers = (cosmoflow(16, **narrow), cosmoflow(32, **narrow)), (12, 13, 14)
    else:
        cases, powers = (cosmoflow(512), cosmoflow(1024)), (27, 29, 28)
    half, whole = cases
    pair = "features.0-1"
    default, large, largest = ({pair: 2**power} for power in powers)
    apart = {"features.0": 2 ** powers[1], "features.1": 2 ** powers[1]}
    ways = [
        Way("layer by layer", half, {"depth_first": ()}),
        Way(f"{pair}, 2^{powers[1]}", half, {"depth_first": large}),
        Way("auto", half, {}, left_gib=4.5),
        Way("auto", half, {}, left_gib=3.25),
        Way("auto", whole, {}, left_gib=24),
        Way(f"{pair}, 2^{powers[0]}", half, {"depth_first": default}),
        Way("auto", whole, {}),
        Way(f"features.0, 2^{powers[1]}", half, {"depth_first": {"features.0": 2 ** powers[1]}}),
        Way(f"features.0, features.1, 2^{powers[1]}", half, {"depth_first": apart}),
        Way(f"{pair}, 2^{powers[2]}", half, {"depth_first": largest}),
    ]
    return ways[:4] if small else ways


def measure_all(ways: list[Way], record: Record) -> None:
    bases: dict[str, Evidence] = {}
    for way in ways:
        left = "" if way.left_gib is None else f", {way.left_gib:g} GiB left"
        found: Found = {"batch": str(way.case), "way": way.name + left}
        if record.is_over:
            record.add(found | {"failure": NO_TIME})
            continue
        _release()
        try:
            with _picked() as words, _memory_left(way) as ballast_gib:
                evidence, figures = _measure(way, ballast_gib)
        except Exception as error:  # the other rows are still wanted
            if DEVICE.type != "cuda":
                raise
            found["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            base = bases.setdefault(str(way.case), evidence)
            found |= figures | {"error": evidence.error(base), "picked": "; ".join(words)}
        record.add(found)


def _measure(way: Way, ballast_gib: float) -> tuple[Evidence, Found]:
    trial = Trial(way.case, LAST, DEVICE, way.ours)
    begun = time.perf_counter()
    evidence = trial.first_step()
    first = time.perf_counter() - begun
    trial.step()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    repeats = 1 if DEVICE.type == "cpu" else 5
    times = device_times(trial.step, repeats, DEVICE)
    host = host_times(trial.step, repeats, DEVICE)
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    return evidence, {
        "ms": statistics.median(times),
        "host_ms": statistics.median(host),
        "peak_gib": peak / GIB - ballast_gib,
        "first_seconds": first,
    }


@contextmanager
def _memory_left(way: Way) -> Iterator[float]:
    """Within it, something else holds as many GiB as it gives, all but what is to be left."""
    ballast = torch.empty(0, dtype=torch.uint8)
    if way.left_gib is not None and DEVICE.type == "cuda":
        batch = 4 * torch.Size(way.case.shape).numel()
        spare = max(0, int(memory_watch.free_bytes(DEVICE) - way.left_gib * GIB - batch))
        ballast = torch.empty(spare, dtype=torch.uint8, device=DEVICE)
    try:
        yield ballast.numel() / GIB
    finally:
        del ballast


@contextmanager
def _picked() -> Iterator[list[str]]:
    """What is logged about memory within it."""
    words: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    log, listener = logging.getLogger("hyperslab"), Listener(logging.INFO)
    before = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        yield words
    finally:
        log.removeHandler(listener)
        log.setLevel(before)


def _release() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def profile_way(way: Way) -> list[str]:
    """The kernels that take most of a step, by their time."""
    from torch.profiler import ProfilerActivity, profile

    trial, on_gpu = Trial(way.case, LAST, DEVICE, way.ours), DEVICE.type == "cuda"
    trial.refill()
    trial.step()
    synchronize(DEVICE)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        trial.step()
        synchronize(DEVICE)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, time_of))
    rows = [(getattr(event, time_of), event.count, event.key[:90]) for event in events]
    rows.insert(0, (sum(row[0] for row in rows), sum(row[1] for row in rows), f"all, {way.name}"))
    return [f"{micros / 1e3:8.2f} ms {count:5} x  {what}" for micros, count, what in rows[:16]]


COLUMNS = ("batch", "way", "ms", "host ms", "GiB", "error", "first s", "")


def cells(found: Found) -> list[str]:
    names = [found["batch"], found["way"]]
    if "failure" in found:
        return [*names, *[""] * (len(COLUMNS) - 3), found["failure"]]
    numbers = [f"{found[name]:.4g}" for name in ("ms", "host_ms", "peak_gib")]
    error, first = f"{found['error']:.1g}", f"{found['first_seconds']:.1f}"
    return [*names, *numbers, error, first, found["picked"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="for depth.json and depth.md")
    parser.add_argument("--budget", type=float, default=90.0, help="begin nothing after as many s")
    parser.add_argument("--profile", action="store_true", help="list the kernels of the second row")
    parser.add_argument("--fused", action="store_true", help="use fused kernels on any GPU")
    parser.add_argument("--small", action="store_true", help="tiny networks; so without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    if options.fused and DEVICE.type == "cuda":
        fused.FASTER_ON.add(torch.cuda.get_device_capability())
    ways = make_ways(small=options.small or DEVICE.type != "cuda")
    record = Record("depth", COLUMNS, cells, folder=options.folder, budget=options.budget)
    measure_all(ways, record)
    if options.json:
        print(json.dumps(record.report(), indent=1))
    else:
        record.print(width=180)
    if options.profile:
        print("\n".join(profile_way(ways[1])), file=sys.stderr)


if __name__ == "__main__":
    main()
