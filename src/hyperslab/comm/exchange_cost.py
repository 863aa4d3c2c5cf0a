"""What one exchange with the neighbours costs on a mesh, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.failure_report import contact
from hyperslab.comm.fetch import post_fetch
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError
from hyperslab.layout import Box, Layout, Span, Split, cut_evenly, plan_exchange

ROWS = 8
"""Of a rank's piece; one goes to each neighbour."""
NUM_SUMMED = 64
NUM_IN_GRAPH = 20
NUM_WARM_UP = 5
NUM_ROUNDS = 3


class ExchangeCost(NamedTuple):
    """Of the slowest rank, in microseconds."""

    nbytes: int
    """Of what goes to each neighbour."""
    host_us: float
    """Until the host has launched it."""
    us: float
    """Until it is done, one after the other."""
    graph_us: float | None
    """As ``us``, replayed from a CUDA graph, where it can be recorded."""


def measure_exchange(mesh: Mesh, nbytes: int, repeats: int = 60) -> ExchangeCost:
    """Each rank fetches a box from each neighbour along depth and sums some numbers of it.

    The sums are compared with what the neighbours hold; ``CommError`` if they differ. Collective
    over all ranks.
    """
    num, numel = mesh.grid.size("depth"), nbytes // 4
    layout = Layout((ROWS * num, numel), (Split("depth", cut_evenly(ROWS * num, num)), None))
    spans = [layout.box(coords).spans[0] for coords in mesh.grid.coords]
    wanted = [Box((Span(s.start - 1, s.stop + 1), Span(0, numel))) for s in spans]
    plan = plan_exchange(mesh.grid, mesh.rank, layout, wanted)
    x = torch.full((ROWS, numel), float(mesh.rank + 1), device=mesh.device)
    due = [(message.peer + 1.0) * min(NUM_SUMMED, numel) for message in plan.receives]

    def run() -> Tensor:
        boxes = post_fetch(x, plan, mesh).wait()
        return torch.stack([box.flatten()[-NUM_SUMMED:].sum() for box in boxes])

    def check(sums: Tensor) -> None:
        if (found := sums.tolist()) != due:
            raise CommError(f"rank {mesh.rank} fetched boxes that sum to {found}, and not to {due}")

    check(run())
    host_us, us = _time(run, repeats, mesh)
    graph_us = None
    if mesh.transport is not None and mesh.device.type == "cuda":
        graph, sums = _record(run, mesh)
        graph_us = _time(graph.replay, max(3, repeats // NUM_IN_GRAPH), mesh)[1] / NUM_IN_GRAPH
        check(sums)
    return ExchangeCost(nbytes, host_us, us, graph_us)


def _time(run: Callable[[], object], repeats: int, mesh: Mesh) -> tuple[float, float]:
    """Microseconds of the host, and until all is done, of a run on the slowest rank.

    The best of some rounds: other work on the machine only makes them slower.
    """
    for _ in range(NUM_WARM_UP):
        run()
    rounds = [_time_round(run, -(-repeats // NUM_ROUNDS), mesh) for _ in range(NUM_ROUNDS)]
    return min(host for host, _ in rounds), min(whole for _, whole in rounds)


def _time_round(run: Callable[[], object], repeats: int, mesh: Mesh) -> tuple[float, float]:
    with contact("timing exchanges", mesh):
        _synchronize(mesh)
        dist.barrier(group=mesh.group)
        begun = time.perf_counter()
        for _ in range(repeats):
            run()
        launched = time.perf_counter()
        _synchronize(mesh)
        seconds = torch.tensor([launched - begun, time.perf_counter() - begun])
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=mesh.group)
    host, whole = (seconds / repeats * 1e6).tolist()
    return host, whole


def _record(run: Callable[[], Tensor], mesh: Mesh) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Many runs in one graph, and where the last leaves its result."""
    _synchronize(mesh)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_IN_GRAPH):
            sums = run()
    return graph, sums


def _synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
