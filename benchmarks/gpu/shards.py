"""What one rank computes of a network that is split over many, for every way to split it."""

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from typing import NamedTuple

import torch
from gpu.ahead import run_ahead
from gpu.cases import Case, cosmoflow, mesh_tangling
from gpu.clock import host_times
from gpu.lone_rank import LoneTrial, Traffic, nobody_answers
from gpu.record import NO_TIME, Found, Record
from gpu.trial import Setting
from torch import nn

LAST = Setting(channels_last=True, benchmark=False)
FEW_RANKS = 16
"""Up to as many, splits come before those of the next network."""
COMPILE_SECONDS = 50.0
FLAT = (2, 8)
"""Ranks along an inner dim alone."""


class Network(NamedTuple):
    name: str
    case: Case
    most_ranks: int


def make_networks(*, small: bool) -> list[Network]:
    if small:
        narrow = {"precision": "fp32", "width": 2}
        return [
            Network("CosmoFlow", cosmoflow(32, **narrow), 2),
            Network("mesh-tangling 2K", mesh_tangling(128, **narrow), 2),
        ]
    return [
        Network("CosmoFlow", cosmoflow(512), 64),
        Network("mesh-tangling 2K", mesh_tangling(2048), 16),
        Network("CosmoFlow", cosmoflow(256), 8),
    ]


def splits_of(network: Network) -> Iterator[dict[str, int]]:
    """All shapes of a mesh of 1, 2, 4 ... ranks, with most ranks along the outermost dims.

    Others differ only by how their faces lie in memory: of those, some splits of one dim are there.
    """
    axes = ("depth", "height", "width")[5 - len(network.case.shape) :]
    powers = [2**i for i in range(network.most_ranks.bit_length())]
    shapes = [s for s in product(powers, repeat=len(axes)) if math.prod(s) <= network.most_ranks]
    for shape in sorted(shapes, key=lambda shape: (math.prod(shape), [-num for num in shape])):
        is_flat = math.prod(shape) == max(shape) in FLAT
        if is_flat or list(shape) == sorted(shape, reverse=True):
            yield {axis: num for axis, num in zip(axes, shape, strict=True) if num > 1}


def shards(networks: list[Network]) -> list[tuple[Network, dict[str, int]]]:
    """What matters most first."""
    found = [(network, axes) for network in networks for axes in splits_of(network)]
    return sorted(found, key=lambda each: math.prod(each[1].values()) > FEW_RANKS)


def compile_shard(number: int) -> None:
    """Has the kernels compiled of the shard that is ``number`` among all."""
    network, axes = shards(make_networks(small=False))[number]
    device = torch.device("cuda", 0)
    model = _make_model(network.case, device)
    trial = LoneTrial(network.case, model, axes, LAST.format_of(len(network.case.shape)), device)
    with nobody_answers(trial.mesh):
        trial.step()
    torch.cuda.synchronize()
    del trial, model
    _release(device)


def measure_shards(
    device: torch.device,
    record: Record,
    *,
    small: bool,
    wanted: Callable[[Network, dict[str, int]], bool] = lambda network, axes: True,
) -> None:
    """Of a network whose shards are ``wanted``, the whole must be, and is the first of them."""
    models: dict[str, nn.Module] = {}
    whole: dict[str, float] = {}
    torch.backends.cudnn.benchmark = False
    every = shards(make_networks(small=small))
    numbers = [number for number, shard in enumerate(every) if wanted(*shard)]
    if device.type == "cuda" and not small and not record.is_over:
        run_ahead(compile_shard, numbers, seconds=COMPILE_SECONDS)
    for network, axes in [every[number] for number in numbers]:
        name = f"{network.name} {network.case}"
        found: Found = {"network": name, "axes": axes, "ranks": math.prod(axes.values())}
        if record.is_over:
            record.add(found | {"failure": NO_TIME})
            continue
        try:
            if name not in models:
                models[name] = _make_model(network.case, device)
            case, repeats = network.case, 1 if small else 3
            found |= _measure(case, models[name], axes, device, repeats)
        except Exception as error:  # the other rows are still wanted
            if small:
                raise
            found["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        else:
            ideal = whole.setdefault(name, found["ms"] * found["ranks"]) / found["ranks"]
            found |= {"ideal_ms": ideal, "efficiency": ideal / found["ms"]}
        record.add(found)
        _release(device)


def _make_model(case: Case, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return case.make().to(device, memory_format=LAST.format_of(len(case.shape)))


def _measure(
    case: Case, model: nn.Module, axes: dict[str, int], device: torch.device, repeats: int
) -> Found:
    trial = LoneTrial(case, model, axes, LAST.format_of(len(case.shape)), device)
    trial.refill()
    with nobody_answers(trial.mesh) as traffic:
        trial.step()
        one_step = Traffic(**asdict(traffic))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return {
            "shard": list(trial.x.shape),
            "host_ms": statistics.median(host_times(trial.step, repeats, device)),
            **trial.parts(),
            "traffic": asdict(one_step),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if trial.x.is_cuda else None,
        }


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


COLUMNS = (
    "network", "split", "ranks", "ms", "forward", "backward", "ideal ms", "efficiency", "interiors",
    "strips", "launches", "host ms", "sent MiB", "messages", "GiB", "",
)  # fmt: skip


def cells(row: Found) -> list[str]:
    names = [row["network"], shown(row["axes"]), str(row["ranks"])]
    if "failure" in row:
        return [*names, *[""] * (len(COLUMNS) - 4), row["failure"]]
    passes = [sum(block[f"{way}_ms"] for block in row["blocks"]) for way in ("forward", "backward")]
    return [
        *names,
        *(f"{ms:.2f}" for ms in (row["ms"], *passes, row["ideal_ms"])),
        f"{row['efficiency']:.0%}",
        *(f"{row[name]:.2f}" for name in ("interior_ms", "strips_ms")),
        str(row["launches"]),
        f"{row['host_ms']:.1f}",
        f"{row['traffic']['sent'] / 2**20:.1f}",
        str(row["traffic"]["messages"]),
        f"{row['peak_gib'] or 0:.2f}",
        "",
    ]


def shown(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {num}" for axis, num in axes.items()) or "none"
