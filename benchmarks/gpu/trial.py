"""One network's training step, in plain PyTorch or parallelized, measured."""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from gpu.cases import Case, Options
from gpu.clock import device_times, host_times
from torch import Tensor, nn

import hyperslab as hs
from hyperslab.train.precision import float32_products

SLOW_SECONDS = 1.0
"""A step that takes longer is not tried with cudnn.benchmark, which would try every algorithm."""
VERY_SLOW_SECONDS = 10.0
"""A step that takes longer is measured once, in one setting."""


@dataclass(frozen=True)
class Setting:
    """What a user may choose without changing the network."""

    channels_last: bool
    benchmark: bool

    def __str__(self) -> str:
        words = "channels_last" if self.channels_last else "contiguous"
        return words + " + cudnn.benchmark" * self.benchmark

    def format_of(self, ndim: int) -> torch.memory_format:
        if not self.channels_last:
            return torch.contiguous_format
        return torch.channels_last_3d if ndim == 5 else torch.channels_last


SETTINGS = [Setting(last, benchmark) for benchmark in (False, True) for last in (False, True)]


@dataclass(frozen=True)
class Evidence:
    """What a step without dropout gave, to compare with that of another."""

    loss: float
    grad: Tensor
    """Of the first weight."""

    def error(self, other: "Evidence") -> float:
        """The larger of both relative differences; NaN where there is one."""
        grad = (self.grad - other.grad).norm() / other.grad.norm()
        loss = abs(self.loss - other.loss) / abs(other.loss)
        return float(torch.stack([grad, torch.tensor(loss, dtype=grad.dtype)]).max())


@dataclass(frozen=True)
class Measured:
    """The best of a step's settings."""

    ms: float
    host_ms: float
    spread: tuple[float, float]
    """The shortest and longest of the repeats, in ms."""
    peak_gib: float
    setting: str
    evidence: Evidence


class Trial:
    """A network with its batch, ready to step: forward, loss, backward; no optimizer."""

    def __init__(
        self, case: Case, setting: Setting, device: torch.device, ours: Options | None
    ) -> None:
        """In plain PyTorch, unless there are options for ``ours``."""
        torch.manual_seed(0)
        self.case, self.device = case, device
        shape, layout = case.shape, setting.format_of(len(case.shape))
        self.model = case.make().to(device, memory_format=layout)
        self.x = torch.empty(shape, device=device, memory_format=layout)
        self.input: Any = self.x
        self.target: Any = case.make_target(device)
        if ours is not None:
            mesh = hs.init(device=device)
            self.model = hs.parallelize(self.model, mesh, **ours)
            self.input = hs.shard(self.x, mesh)
            self.target = hs.shard(self.target, mesh, axes=case.target_axes)

    def refill(self) -> None:
        self.x.normal_()

    def step(self) -> Any:
        self.model.zero_grad(set_to_none=True)
        bf16 = self.case.precision == "bf16" and self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss = self.case.loss(self.model(self.input), self.target)
        loss.backward()
        return loss

    def first_step(self) -> Evidence:
        """Without dropout, whose masks are others in plain PyTorch; on a batch that is always the
        same.
        """
        self.x.normal_(generator=torch.Generator(self.device).manual_seed(1))
        with _without_dropout(self.model):
            loss = self.step().item()
        grad = next(self.model.parameters()).grad
        assert grad is not None
        return Evidence(loss, grad.double().cpu())


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    before = [layer.p for layer in layers]
    try:
        for layer in layers:
            layer.p = 0.0
        yield
    finally:
        for layer, p in zip(layers, before, strict=True):
            layer.p = p


def measure(
    case: Case, device: torch.device, choices: Sequence[Options | None], seconds: float
) -> Measured | str:
    """The fastest setting's figures, each measured for about ``seconds``; else why all failed."""
    best: Measured | None = None
    failure = ""
    settings = SETTINGS if device.type == "cuda" else SETTINGS[:1]
    for setting, ours in product(settings, choices):
        start = time.perf_counter()
        if setting.benchmark and best and best.ms > SLOW_SECONDS * 1e3:
            break
        try:
            found = _measure_setting(case, setting, device, ours, seconds)
            best = min(filter(None, (best, found)), key=lambda each: each.ms)
        except Exception as error:  # noqa: BLE001 - whatever fails is told in the table
            failure = failure or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if time.perf_counter() - start > 2 * VERY_SLOW_SECONDS:
            break
    return best or failure


def _measure_setting(
    case: Case, setting: Setting, device: torch.device, ours: Options | None, seconds: float
) -> Measured:
    torch.backends.cudnn.benchmark = setting.benchmark
    with float32_products("tf32"):
        trial = Trial(case, setting, device, ours)
        evidence = trial.first_step()
        times = device_times(trial.step, 1, device, trial.refill)
        if times[0] < VERY_SLOW_SECONDS * 1e3:
            repeats = min(50, max(3, round(seconds * 1e3 / times[0])))
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times = device_times(trial.step, repeats, device, trial.refill)
        few = 1 if times[0] > SLOW_SECONDS * 1e3 else min(20, len(times))
        host = host_times(trial.step, few, device, trial.refill)
    words = [str(setting), *(f"{name}={value}" for name, value in (ours or {}).items())]
    return Measured(
        statistics.median(times),
        statistics.median(host),
        (min(times), max(times)),
        torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        ", ".join(words),
        evidence,
    )
