"""What does an exchange between ranks that share one GPU cost, by each transport?

    python benchmarks/gpu_exchange.py --json > exchange.json
    python benchmarks/gpu_exchange.py --small        (tiny, also without a GPU)

`exchange`: each rank fetches one box from each neighbour along depth and sums a few numbers of
each. `host us` is the time until the host has launched it, `us` until the GPU has done it, one
after the other; `graph us` the same, replayed from a CUDA graph of 20. Every result is compared
with what the neighbours hold.

`step`: forward and backward of CosmoFlow in bf16 on ranks along depth, with gradients compared
between the transports. Ranks that share a GPU do the same work together as one rank does.

Kernels of different processes run at the same time only with MPS, which is started unless --no-mps
is given.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from hyperslab.testing import Team

TRANSPORTS = ("auto", "device")
NUM_IN_GRAPH = 20


@dataclass(frozen=True)
class Exchange:
    """One exchange, in microseconds."""

    ranks: int
    transport: str
    kib: float
    host_us: float
    us: float
    graph_us: float | None


@dataclass(frozen=True)
class Step:
    ranks: int
    transport: str
    size: int
    ms: float
    host_ms: float
    grad_norm: float


def exchange_on_rank(num_ranks: int, transport: str, sizes: list[int], repeats: int) -> list[dict]:
    """Collective over all ranks."""
    import torch

    import hyperslab as hs
    from hyperslab.comm.fetch import post_fetch
    from hyperslab.layout import Box, Layout, Span, Split, cut_evenly, plan_exchange

    on_gpu = torch.cuda.is_available()
    mesh = hs.init(depth=num_ranks, timeout_seconds=60, transport=transport)
    rows = []
    for size in sizes:
        split = Split("depth", cut_evenly(8 * num_ranks, num_ranks))
        layout = Layout((8 * num_ranks, size // 4), (split, None))
        spans = layout.splits[0].cuts.spans
        wanted = [Box((Span(s.start - 1, s.stop + 1), Span(0, size // 4))) for s in spans]
        plan = plan_exchange(mesh.grid, mesh.rank, layout, wanted)
        x = torch.full((8, size // 4), float(mesh.rank + 1), device=mesh.device)

        def run(x: torch.Tensor = x, plan: object = plan) -> torch.Tensor:
            boxes = post_fetch(x, plan, mesh).wait()
            return torch.stack([box.flatten()[-64:].sum() for box in boxes])

        def is_right(out: torch.Tensor, plan: object = plan) -> bool:
            return out.tolist() == [(message.peer + 1) * 64 for message in plan.receives]

        assert is_right(run())
        host, whole = _timed(run, repeats, mesh)
        graph = None
        if on_gpu and transport == "device":
            graph = _graph_time(run, is_right, repeats, mesh)
        rows.append(asdict(Exchange(num_ranks, transport, size / 1024, host, whole, graph)))
    return rows


def _timed(run: Callable, repeats: int, mesh: object) -> tuple[float, float]:
    """Microseconds of the host, and until all is done."""
    import torch
    import torch.distributed as dist

    for _ in range(5):
        run()
    _synchronize()
    dist.barrier(group=mesh.group)
    begun = time.perf_counter()
    for _ in range(repeats):
        run()
    launched = time.perf_counter()
    _synchronize()
    done = time.perf_counter()
    found = torch.tensor([launched - begun, done - begun], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.group)
    return tuple((found / repeats * 1e6).tolist())


def _graph_time(run: Callable, is_right: Callable, repeats: int, mesh: object) -> float:
    import torch
    import torch.distributed as dist

    _synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_IN_GRAPH):
            out = run()
    dist.barrier(group=mesh.group)
    found = _timed(graph.replay, max(3, repeats // NUM_IN_GRAPH), mesh)[1] / NUM_IN_GRAPH
    assert is_right(out)
    return found


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_on_rank(num_ranks: int, transport: str, size: int, repeats: int) -> dict:
    """Collective over all ranks."""
    import torch
    import torch.distributed as dist

    import hyperslab as hs
    from hyperslab.models import CosmoFlow

    mesh = hs.init(depth=num_ranks, timeout_seconds=100, transport=transport)
    on_gpu = mesh.device.type == "cuda"
    torch.manual_seed(0)
    last = torch.channels_last_3d if on_gpu else torch.contiguous_format
    net = CosmoFlow(size, dropout=0.0).to(mesh.device, memory_format=last)
    model = hs.parallelize(net, mesh)
    shape = (1, 4, size, size, size)
    generator = torch.Generator(mesh.device).manual_seed(1)
    whole = torch.randn(shape, generator=generator, device=mesh.device, dtype=torch.bfloat16)
    part = whole.chunk(num_ranks, 2)[mesh.rank].contiguous(memory_format=last)
    del whole
    x = hs.from_local(part, mesh, shape) if num_ranks > 1 else part

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(mesh.device.type, torch.bfloat16, on_gpu):
            out = model(x if on_gpu else x.float())
        out.square().mean().backward()

    for _ in range(4):
        step()
    found = []
    for _ in range(repeats):
        _synchronize()
        if num_ranks > 1:
            dist.barrier(group=mesh.group)
        begun = time.perf_counter()
        step()
        launched = time.perf_counter()
        _synchronize()
        found.append((time.perf_counter() - begun, launched - begun))
    ms, host = (1e3 * sorted(each)[repeats // 2] for each in zip(*found, strict=True))
    norm = torch.stack([p.grad.double().norm() for p in net.parameters()]).norm().item()
    return asdict(Step(num_ranks, transport, size, ms, host, norm))


def measure(options: argparse.Namespace) -> dict:
    sizes = [1 << 10] if options.small else [1 << 14, 1 << 18, 1 << 20, 1 << 22]
    repeats, num_steps = (3, 3) if options.small else (60, 7)
    transports = TRANSPORTS[:1] if options.small else TRANSPORTS
    cubes = [32] if options.small else options.sizes
    report: dict = {"exchange": [], "step": []}
    for num_ranks in (1, 2) if options.small else (1, 2, 4):
        with Team(num_ranks, timeout_seconds=200) as team:
            for transport in transports if num_ranks > 1 else transports[:1]:
                if num_ranks > 1:
                    ranks = team.run(exchange_on_rank, num_ranks, transport, sizes, repeats)
                    report["exchange"] += ranks[0]
                for size in cubes:
                    ranks = team.run(step_on_rank, num_ranks, transport, size, num_steps)
                    report["step"].append(max(ranks, key=lambda each: each["ms"]))
    return report


@contextmanager
def mps(wanted: bool) -> Iterator[None]:
    """Within it, processes share the GPU at the same time."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as pipes, tempfile.TemporaryDirectory() as logs:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = pipes
        os.environ["CUDA_MPS_LOG_DIRECTORY"] = logs
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def print_tables(report: dict) -> None:
    for name, rows in report.items():
        table = Table(*rows[0], title=name) if rows else Table(title=name)
        for row in rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        Console(file=sys.stderr).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="seconds, also without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-mps", action="store_true", help="processes take turns on the GPU")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512], help="of CosmoFlow")
    options = parser.parse_args()
    with mps(not options.no_mps and not options.small):
        report = measure(options)
    print_tables(report)
    if options.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
