"""Which tiles, kernels and settings are fastest on this GPU?

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --only tiles syncs
    python benchmarks/gpu_kernels.py --small            (tiny tensors, also without a GPU)

Sections, each a table of its own:
  tiles    convolutions forward and backward in tiles of 2^25 elements up to no tiles at all
  pools    activation and pool in one kernel, against torch's two
  tuning   the same kernels with other blocks
  fused    convolutions of few channels, against cuDNN's
  profile  the 20 kernels that take most of a CosmoFlow step
  syncs    how often a step makes the host wait for the GPU
The floor counts each tensor once, at the rate of a large copy measured in the same run, or the
FLOPs at that of a large matrix product if that takes longer.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
import torch.nn.functional as F
from gpu.cases import Options, make_cases, make_small_cases
from gpu.clock import measure_ceilings, synchronize
from gpu.pools import pools_rows, tuning_rows
from gpu.rows import Bench, Row, Timer, backward_of, errors_of, print_rows
from gpu.trial import Setting, Trial
from torch import Tensor

from hyperslab.kernels import fused, tiles
from hyperslab.kernels.conv import Settings, conv_few_channels

LAYERS = [(4, 16, 512), (4, 16, 256), (16, 32, 256), (32, 32, 256), (16, 32, 512)]
"""Channels before and after a 3^3 convolution, and the width of the cube."""
LIMITS = [*range(25, 32), 40]
"""Powers of two: the elements of a tile, at most. No tensor here has 2^40."""
ONE, THREE = (1, 1, 1), (3, 3, 3)


def tiles_rows(bench: Bench) -> Iterator[Row]:
    layers = [(2, 4, 12)] if bench.small else LAYERS
    for channels, filters, width in layers:
        for last in (True, False):
            x = bench.randn((1, channels, width, width, width), last=last)
            weight = bench.randn((filters, channels, *THREE), last=last)
            grad = bench.randn((1, filters, width, width, width), last=last)
            for power in (8, 10, 40) if bench.small else LIMITS:
                if power == 40 and grad.numel() > 2**31:
                    continue  # cuDNN has nothing for it, or worse
                with _tiles_of(2**power - 1):
                    yield from _conv_rows(bench, x, weight, grad, _words(power, last=last))
            del x, grad


def _words(power: int, *, last: bool) -> str:
    tile = "no tiles" if power == 40 else f"tiles of 2^{power}"
    return f"{'channels_last' if last else 'contiguous'}, {tile}"


@contextmanager
def _tiles_of(numel: int) -> Iterator[None]:
    before, tiles.MAX_NUMEL = tiles.MAX_NUMEL, numel
    try:
        yield
    finally:
        tiles.MAX_NUMEL = before


def _conv_rows(bench: Bench, x: Tensor, weight: Tensor, grad: Tensor, words: str) -> Iterator[Row]:
    settings = Settings(ONE, ONE, 1)
    what = f"{x.shape[1]}->{weight.shape[0]} at {x.shape[2]}^3, {words}"
    moved = sum(t.nbytes for t in (x, weight, grad))
    flops = 2 * grad.numel() * weight[0].numel()
    first = x.shape[1] <= 4  # as the network's input, it wants no gradient
    wants = (not first, True, False)

    def forward() -> object:
        return settings.run(x, weight, None, ONE)

    def backward() -> object:
        return settings.run_backward(grad, x, weight, ONE, wants=wants)

    yield bench.timer.row(f"{what}, forward", forward, nbytes=moved, flops=flops, dtype=x.dtype)
    both = flops * (1 + wants[0])
    more = moved + x.nbytes * wants[0]
    yield bench.timer.row(f"{what}, backward", backward, nbytes=more, flops=both, dtype=x.dtype)


def fused_conv_rows(bench: Bench) -> Iterator[Row]:
    """Convolutions of few channels with their activation, against cuDNN's and torch's."""
    shapes = [(1, 4, 128, 512, 512), (1, 1, 128, 512, 512)]
    for shape in [(1, 2, 6, 8, 8)] if bench.small else shapes:
        x = bench.randn(shape, last=True)
        weight = bench.randn((16, shape[1], *THREE), last=True)
        yield from _fused_rows(bench, x, weight, "cuDNN + leaky", _conv_then_leaky)
        note = errors_of(
            lambda w, x=x: _conv_and_leaky(x, w),
            lambda w, x=x: _conv_then_leaky(x.float(), w),
            weight,
        )
        yield from _fused_rows(bench, x, weight, "one kernel", _conv_and_leaky, note)


def _conv_then_leaky(x: Tensor, weight: Tensor) -> Tensor:
    return F.leaky_relu(F.conv3d(x, weight, padding=1), 0.01)


def _conv_and_leaky(x: Tensor, weight: Tensor) -> Tensor:
    return conv_few_channels(x, weight, None, ONE, slope=0.01)


def _fused_rows(
    bench: Bench,
    x: Tensor,
    weight: Tensor,
    name: str,
    run: Callable[[Tensor, Tensor], Tensor],
    note: str = "",
) -> Iterator[Row]:
    what = f"conv + leaky, {'x'.join(map(str, x.shape[1:]))} -> {len(weight)}, {name}"
    made = x[0, 0].numel() * len(weight) * x.itemsize
    flops = 2 * x[0, 0].numel() * weight.numel()

    def forward() -> object:
        return run(x, weight)

    moved = x.nbytes + made
    numbers = {"flops": flops, "dtype": x.dtype}
    yield bench.timer.row(f"{what}, forward", forward, nbytes=moved, note=note, **numbers)
    source = weight.detach().requires_grad_()
    backward = backward_of(lambda: run(x, source), source)
    moved = x.nbytes + 2 * made  # the activation's gradient wants its output's signs
    yield bench.timer.row(f"{what}, backward", backward, nbytes=moved, **numbers)


def _cosmoflow(bench: Bench, ours: Options | None) -> Trial:
    """After a warm-up."""
    case = make_small_cases()["512-bf16"] if bench.small else make_cases()["512-bf16"]
    trial = Trial(case, Setting(channels_last=True, benchmark=False), bench.device, ours)
    trial.refill()
    for _ in range(2):
        trial.step()
    synchronize(bench.device)
    return trial


def profile_rows(bench: Bench) -> Iterator[Row]:
    """By time on the device; on CPUs, operators by their own time."""
    from torch.profiler import ProfilerActivity, profile

    trial, on_gpu = _cosmoflow(bench, {}), bench.device.type == "cuda"
    activities = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if on_gpu else set())
    with profile(activities=activities) as found:
        trial.step()
        synchronize(bench.device)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [e for e in found.key_averages() if not on_gpu or e.device_type.name == "CUDA"]
    events.sort(key=lambda event: -getattr(event, time_of))
    total = sum(getattr(event, time_of) for event in events) or 1
    for event in events[:20]:
        micros = getattr(event, time_of)
        note = f"{event.count} calls, {100 * micros / total:.1f}%"
        yield Row(event.key[:90], micros / 1e3, note=note)


def syncs_rows(bench: Bench) -> Iterator[Row]:
    """One row for each place where a step waits, and how often; no row: nowhere."""
    for name, ours in (("plain", None), ("ours", {})):
        trial = _cosmoflow(bench, ours)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if bench.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                trial.step()
            finally:
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        places = Counter(
            f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
        )
        yield Row(f"{name}: waits in a step", note=str(sum(places.values())))
        for place, count in places.most_common():
            yield Row(f"  {place}", note=str(count))
        del trial


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "pools": pools_rows,
    "tuning": tuning_rows,
    "fused": fused_conv_rows,
    "profile": profile_rows,
    "syncs": syncs_rows,
    "tiles": tiles_rows,
}


def run_section(name: str, bench: Bench) -> list[Row]:
    rows: list[Row] = []
    try:
        rows.extend(SECTIONS[name](bench))
    except Exception as error:  # noqa: BLE001 - other sections are still wanted
        rows.append(Row(f"{type(error).__name__}: {error}"[:150], note="the section ended here"))
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--fused", action="store_true", help="use fused kernels on any GPU")
    parser.add_argument("--seconds", type=float, default=0.1, help="about, for each row")
    parser.add_argument("--small", action="store_true", help="tiny tensors; so without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    small = options.small or not has_gpu
    if options.fused and has_gpu:
        fused.FASTER_ON.add(torch.cuda.get_device_capability())
    timer = Timer(device, measure_ceilings(device), seconds=0 if small else options.seconds)
    found = {}
    for name in options.only:
        found[name] = run_section(name, Bench(timer, small))
        if not options.json:
            print_rows(name, found[name])
            sys.stdout.flush()
    if options.json:
        print(json.dumps({name: [*map(asdict, rows)] for name, rows in found.items()}, indent=1))


if __name__ == "__main__":
    main()
