"""Measures the kernels of a network at the sizes of its shards, and the links between ranks."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.comm.exchange_cost import measure_exchange
from hyperslab.comm.join import init
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import AXES, Grid
from hyperslab.nn.parallel.parallelize import parallelize
from hyperslab.planner.machine import Link
from hyperslab.planner.measured import Calibration, KernelRow, cpu_name, save
from hyperslab.planner.network import INPUT, Layer, Network, from_json
from hyperslab.planner.stages import signature, stages

SHARES = (1, 2, 4, 8, 16, 64)
"""Of a sample: the pieces that are measured."""
SMALL_NBYTES, LARGE_NBYTES = 2**14, 2**21
"""Of the two messages from which latency and rate of a link follow."""
MOST_NBYTES = 0.25
"""Of free memory that the input of a stage may take, for all that is made of it has to fit too."""
REPEATS = 5
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "relu_": F.relu, "leaky_relu": F.leaky_relu, "leaky_relu_": F.leaky_relu,
    "gelu": F.gelu, "silu": F.silu, "elu": F.elu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "softplus": F.softplus, "hardswish": F.hardswish, "dropout": F.dropout, "prelu": F.leaky_relu,
}  # fmt: skip


class Stage(nn.Module):
    """The layers of a stage, with weights of their own."""

    def __init__(self, network: Network, stage: tuple[int, ...]) -> None:
        super().__init__()
        first = network.layers[stage[0]]
        self.channels = network.shape_of(first.inputs[0])[0]
        self.parts = nn.Sequential(*self._make(network, stage))

    def _make(self, network: Network, stage: tuple[int, ...]) -> Iterator[nn.Module]:
        channels = self.channels
        for number in stage:
            layer = network.layers[number]
            yield _module(layer, channels)
            channels = layer.channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts(x)
        return out


class _Pointwise(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *, inplace: bool) -> None:
        super().__init__()
        self.function, self.options = function, {"inplace": True} if inplace else {}

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self.options)


class _Norm(nn.Module):
    def __init__(self, op: str, channels: int) -> None:
        super().__init__()
        self.op, self.groups = op, math.gcd(channels, 8)
        self.weight, self.bias = (nn.Parameter(torch.ones(channels)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.op == "batch_norm":
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True)
        if self.op == "group_norm":
            return F.group_norm(x, self.groups, self.weight, self.bias)
        return F.instance_norm(x, weight=self.weight, bias=self.bias)


def _module(layer: Layer, channels: int) -> nn.Module:
    """What computes as the layer does. Raises ``KeyError`` where nothing here does."""
    num, groups = len(layer.windows), layer.groups
    numbers = [
        tuple(getattr(window, name) for window in layer.windows)
        for name in ("kernel", "stride", "padding", "dilation")
        if all(hasattr(window, name) for window in layer.windows)
    ]
    if layer.family == "conv" and len(numbers) == 4:
        kind = "ConvTranspose" if "transpose" in layer.op else "Conv"
        make = getattr(nn, f"{kind}{num}d")
        kernel, stride, padding, dilation = numbers
        options: dict[str, Any] = {"dilation": dilation, "groups": groups, "bias": False}
        made: nn.Module = make(channels, layer.channels, kernel, stride, padding, **options)
        return made
    if layer.family == "pool" and len(numbers) == 4 and "adaptive" not in layer.op:
        make = getattr(nn, f"{'Avg' if 'avg' in layer.op else 'Max'}Pool{num}d")
        pool: nn.Module = make(*numbers[:3])
        return pool
    if layer.family == "norm" and layer.op in ("batch_norm", "group_norm", "instance_norm"):
        return _Norm(layer.op, channels)
    if layer.family == "pointwise":
        has_option = layer.op in ("relu", "leaky_relu", "elu", "silu")
        return _Pointwise(POINTWISE[layer.op], inplace=layer.is_in_place and has_option)
    raise KeyError(layer.op)


def measurable(network: Network) -> dict[str, tuple[int, ...]]:
    """The stages that can be measured, one for each signature."""
    found: dict[str, tuple[int, ...]] = {}
    for stage in stages(network):
        first = network.layers[stage[0]]
        name = signature(network, stage)
        if name in found or first.family not in ("conv", "norm", "pool", "pointwise"):
            continue
        if len(first.inputs) != 1 or not network.is_spatial(first.inputs[0]):
            continue
        try:
            with torch.device("meta"):
                Stage(network, stage)
        except KeyError:
            continue
        found[name] = stage
    return found


def measure_kernels(
    network: Network,
    precision: str,
    mesh: Mesh,
    ranks: int,
    *,
    shares: Iterable[int] = SHARES,
    meet: Callable[[], None] = lambda: None,
) -> dict[str, tuple[KernelRow, ...]]:
    """Seconds of every stage on parts of a sample, as one rank of a mesh takes them.

    ``mesh`` is of this rank alone; ``ranks`` measure at the same time, and ``meet`` before each.
    """
    found = {}
    for name, stage in measurable(network).items():
        rows = {}
        for extents in _pieces(network, stage, shares):
            meet()
            row = _measure(network, stage, extents, precision, mesh, ranks)
            if row is not None:
                rows[row.numel] = row
        if rows:
            found[f"{precision}: {name}"] = tuple(rows.values())
    return found


def _pieces(
    network: Network, stage: tuple[int, ...], shares: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """Extents of a stage's input, cut along the dims in turn, the longest first."""
    whole = network.shape_of(network.layers[stage[0]].inputs[0])[1:]
    for share in shares:
        extents = [*whole]
        left = share
        while left > 1:
            longest = max(range(len(extents)), key=lambda dim: extents[dim])
            if extents[longest] < 2:
                return
            extents[longest], left = -(-extents[longest] // 2), left // 2
        yield tuple(extents)


def _measure(
    network: Network,
    stage: tuple[int, ...],
    extents: Sequence[int],
    precision: str,
    mesh: Mesh,
    ranks: int,
) -> KernelRow | None:
    dtype, device = DTYPES[precision], mesh.device
    is_first = network.layers[stage[0]].inputs == (INPUT,)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(2 + len(extents))
    numel = network.shape_of(network.layers[stage[0]].inputs[0])[0] * math.prod(extents)
    if numel * dtype.itemsize > MOST_NBYTES * _free_nbytes(device):
        return None
    try:
        module = Stage(network, stage).to(device, dtype)
        x = torch.randn(1, module.channels, *extents, device=device, dtype=dtype)
        if device.type == "cuda" and layout is not None:
            x = x.contiguous(memory_format=layout)
            for weight in module.parameters():
                if weight.ndim == x.ndim:
                    weight.data = weight.data.contiguous(memory_format=layout)
        model = parallelize(module, mesh, depth_first=())
        forward, backward = _times(model, x.requires_grad_(not is_first), device)
    except (RuntimeError, ValueError, MemoryError):  # too large, or an output that is empty
        return None
    return KernelRow(ranks, numel, forward, backward)


def _free_nbytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def _times(model: nn.Module, x: Tensor, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass: of kernels alone on a GPU."""
    grad = torch.randn_like(model(x))

    def run() -> tuple[float, float]:
        x.grad = None
        for weight in model.parameters():
            weight.grad = None
        begun = time.perf_counter()
        out = model(x)
        middle = time.perf_counter()
        if out.requires_grad:
            out.backward(grad)
        return middle - begun, time.perf_counter() - middle

    run()
    if device.type != "cuda":
        both = [run() for _ in range(REPEATS)]
        return min(forward for forward, _ in both), min(backward for _, backward in both)
    return _kernel_seconds(model, x, grad)


def _kernel_seconds(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[float, float]:
    """What the profiler says of kernels: of forward passes, and of whole steps."""

    def step() -> None:
        for weight in (x, *model.parameters()):
            weight.grad = None
        out = model(x)
        if out.requires_grad:
            out.backward(grad)

    forward, both = _profiled(lambda: model(x)), _profiled(step)
    return forward, max(0.0, both - forward)


def _profiled(run: Callable[[], object]) -> float:
    """The seconds of a run's kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    kernels = (event.self_device_time_total for event in found.key_averages())
    return float(sum(kernels)) / 1e6 / REPEATS


def measure_link(mesh: Mesh) -> Link:
    """Between neighbours along depth, while all ranks of the mesh exchange."""
    small, large = (measure_exchange(mesh, nbytes) for nbytes in (SMALL_NBYTES, LARGE_NBYTES))
    seconds = [(each.graph_us or each.us) / 1e6 for each in (small, large)]
    rate = (LARGE_NBYTES - SMALL_NBYTES) / max(1e-9, seconds[1] - seconds[0])
    return Link(seconds[0], rate)


def measure_values(device: torch.device) -> dict[str, float]:
    """The rate of memory."""
    numel = 2**27 if device.type == "cuda" else 2**24
    x, y = (torch.zeros(numel, device=device) for _ in range(2))
    seconds = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        y.copy_(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return {"bytes_per_second": 2 * x.nbytes / min(seconds)}


def device_name(device: torch.device) -> str:
    """By which a calibration is kept."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def measure_rank(
    network: Network,
    precision: str,
    ranks: int,
    device: str,
    shares: Sequence[int],
    version: str = "",
) -> Calibration:
    """What one of ``ranks`` processes measures while the others do the same.

    ``version`` is that of hyperslab. Collective over all ranks.
    """
    everyone = init(depth=ranks, device=device)
    links = {ranks: measure_link(everyone)} if ranks > 1 else {}
    alone = _alone(everyone)
    kernels = measure_kernels(
        network, precision, alone, ranks, shares=shares, meet=lambda: _meet(everyone)
    )
    values = measure_values(everyone.device) if ranks == 1 else {}
    return Calibration(
        device_name(everyone.device),
        str(torch.__version__),
        version,
        kernels,
        links,
        values,
    )


def _alone(mesh: Mesh) -> Mesh:
    """A mesh of this rank, whatever others there are."""
    if mesh.num_ranks == 1:
        return mesh
    return replace(
        mesh, grid=Grid((1,) * len(AXES)), rank=0, backend=None, transport=None, sockets=None
    )


def _meet(mesh: Mesh) -> None:
    if mesh.num_ranks > 1:
        torch.distributed.barrier(group=mesh.group)


def main() -> None:
    """One rank: ``python -m ... NETWORK PRECISION RANKS DEVICE VERSION FILE``.

    Rank 0 adds what it measured to FILE.
    """
    network, precision, ranks, device, version, result = sys.argv[1:]
    read = from_json(Path(network).read_text(), network)
    found = measure_rank(read, precision, int(ranks), device, SHARES, version)
    if int(os.environ.get("RANK", "0")) == 0:
        save(found, Path(result))


if __name__ == "__main__":
    main()
