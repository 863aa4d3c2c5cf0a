"""A network's step on ranks that may share a GPU: how long it takes, and whether it is right."""

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from gpu.cases import Case
from gpu.clock import synchronize
from gpu.trial import Setting, Trial, release
from torch import Tensor, nn

import hyperslab as hs
from hyperslab.layout import AXES
from hyperslab.train.model import float32_products

WARM_UP_STEPS = 5
"""With graphs the first pass runs as ever, the second is recorded."""
NUM_ROUNDS = 3
TIMEOUT_SECONDS = 60.0
MORE_PRECISE = {"bf16": "fp32", "tf32": "fp32", "fp32": "fp64"}


@dataclass(frozen=True)
class SplitStep:
    """What one rank found."""

    ms: float
    """Of a step, where one follows the other without a pause."""
    host_ms: float
    """Until the host has launched a step that follows another one, while it waits for no GPU."""
    first_host_ms: float
    """The same of a step after a pause, in which the GPU became idle and the host went to sleep."""
    grad_norm: float
    off: float | None
    """The norm of the difference from the gradient that was given, relative to that one's."""
    messages_by: str
    peak_gib: float
    notes: list[str] = field(default_factory=list)
    """Warnings, such as why passes were not recorded."""


class SplitTrial(Trial):
    """A network without dropout with this rank's piece of its batch, the same on any mesh."""

    def __init__(self, case: Case, mesh: hs.Mesh, *, graphs: bool) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, mesh.device
        dtype = torch.float64 if case.precision == "fp64" else torch.float32
        last = Setting(channels_last=mesh.device.type == "cuda", benchmark=False)
        layout = last.format_of(len(case.shape))
        model = case.make().to(mesh.device, dtype, memory_format=layout)
        for part in model.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        self.model = hs.parallelize(model, mesh, cuda_graphs=graphs)
        self.x = _piece(case.shape, mesh, dtype).contiguous(memory_format=layout)
        self.input = hs.from_local(self.x, mesh, case.shape)
        torch.manual_seed(2)
        target = case.make_target("cpu").to(mesh.device)
        if target.is_floating_point():
            target = target.to(dtype)
        self.target = hs.shard(target, mesh, axes=case.target_axes)
        self.weights = [*self.model.parameters()]

    def gradients(self) -> list[Tensor]:
        return [p.grad.detach().cpu() for p in self.weights if p.grad is not None]


def _piece(shape: tuple[int, ...], mesh: hs.Mesh, dtype: torch.dtype) -> Tensor:
    """This rank's part of random numbers that are the same on any mesh."""
    generator = torch.Generator(mesh.device).manual_seed(1)
    found = torch.randn(shape, generator=generator, device=mesh.device)
    for axis in mesh.grid.long_axes:
        dim = AXES.index(axis) - len(AXES)  # images have no depth
        found = found.chunk(mesh.grid.size(axis), dim)[mesh.coords[axis]]
    return found.to(dtype)


def step_on_rank(
    case: Case,
    axes: dict[str, int],
    transport: str,
    graphs: bool,
    repeats: int,
    reference: str | None = None,
    keep: str | None = None,
) -> dict[str, Any]:
    """A ``SplitStep``, compared with the gradients in ``reference``; its own go to ``keep``.

    Collective over all ranks.
    """
    release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    mesh = hs.init(**axes, timeout_seconds=TIMEOUT_SECONDS, transport=transport)
    with _warnings() as notes, float32_products("tf32"):
        trial = SplitTrial(case, mesh, graphs=graphs)
        for _ in range(WARM_UP_STEPS):
            trial.step()
        if mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(mesh.device)
        ms = statistics.median(_round_ms(trial, mesh, repeats) for _ in range(NUM_ROUNDS))
        host = [_host_ms(trial, mesh) for _ in range(repeats)]
        found = trial.gradients()
    if keep and mesh.rank == 0:
        torch.save(found, keep)
    peak = torch.cuda.max_memory_allocated(mesh.device) if mesh.device.type == "cuda" else 0
    return asdict(
        SplitStep(
            ms,
            statistics.median(later for _, later in host),
            statistics.median(first for first, _ in host),
            _norm(found),
            _off(found, torch.load(reference)) if reference else None,
            mesh.messages_by,
            peak / 2**30,
            notes,
        )
    )


def rounding_of(case: Case, kept: str) -> float:
    """How far the gradients in ``kept`` are off those of a more precise step, on one rank."""
    mesh = hs.init()
    release(mesh.device)
    precise = replace(case, precision=MORE_PRECISE[case.precision])
    with float32_products("fp32"):
        trial = SplitTrial(precise, mesh, graphs=False)
        trial.step()
        found = trial.gradients()
    return _off(torch.load(kept), found)


def _round_ms(trial: Trial, mesh: hs.Mesh, repeats: int) -> float:
    _meet(mesh)
    begun = time.perf_counter()
    for _ in range(repeats):
        trial.step()
    synchronize(mesh.device)
    return (time.perf_counter() - begun) / repeats * 1e3


def _host_ms(trial: Trial, mesh: hs.Mesh) -> tuple[float, float]:
    """Of a first step, and of the second of two that follow: the GPU's queue has room for all."""
    _meet(mesh)
    begun = [time.perf_counter()]
    for _ in range(3):
        trial.step()
        begun.append(time.perf_counter())
    return (begun[1] - begun[0]) * 1e3, (begun[3] - begun[2]) * 1e3


def _meet(mesh: hs.Mesh) -> None:
    synchronize(mesh.device)
    if mesh.num_ranks > 1:
        dist.barrier(group=mesh.group)


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([each.double().norm() for each in tensors]).norm())


def _off(found: list[Tensor], right: list[Tensor]) -> float:
    differences = [a.double() - b.double() for a, b in zip(found, right, strict=True)]
    return _norm(differences) / _norm(right)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What hyperslab warns of within it, each line once."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() not in found:
                found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("hyperslab").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("hyperslab").removeHandler(handler)


def slowest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks of a step, the worst figures."""
    worst = {
        name: max((rank[name] for rank in ranks if rank[name] is not None), default=None)
        for name in ("ms", "host_ms", "first_host_ms", "grad_norm", "off", "peak_gib")
    }
    return ranks[0] | worst
