"""One network's training step, in plain PyTorch or parallelized, measured."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from gpu.cases import Case, Options
from gpu.clock import device_times, host_times
from torch import Tensor, nn

import hyperslab as hs
from hyperslab.train.model import float32_products

Result = TypeVar("Result")

SLOW_SECONDS = 1.0
"""A step that takes longer is not tried with cudnn.benchmark, which would try every algorithm."""
VERY_SLOW_SECONDS = 4.0
"""A step that takes longer is timed once."""
SHORT_SECONDS = 0.1
"""Steps that take less are compared in turns."""
WARM_UP_STEPS = 5
LEAD_STEPS = 2
"""Of a block, that are not counted: another side has run before."""
BLOCK_STEPS = 5
"""Of a block, that are timed on the device, and as many on the host."""
TOO_SLOW = 1.5
"""A setting whose step takes as many times the best one's is not looked at further."""
WARM_UP_SECONDS = 10.0
"""What a first step may take longer than others: kernels are compiled and algorithms chosen."""
SIDE_SECONDS = 25.0
"""After as long, the best setting so far is the best."""


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


SETTINGS = [Setting(last, benchmark) for benchmark in (False, True) for last in (True, False)]
_benchmarked = ThreadPoolExecutor(1, "cudnn.benchmark")


def run_with(setting: Setting, run: Callable[..., Result], *args: Any) -> Result:
    """What ``run`` returns, with this ``setting`` of cuDNN.

    PyTorch keeps the algorithm of a convolution by thread and does not ask with which setting it
    was chosen: in one thread, the first setting that ran would be measured under both names.
    """
    torch.backends.cudnn.benchmark = setting.benchmark
    return _benchmarked.submit(run, *args).result() if setting.benchmark else run(*args)


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
    host_ms: float | None
    """None where a step takes so long that the host's share says nothing."""
    spread: tuple[float, float]
    """The shortest and longest of the repeats, in ms."""
    peak_gib: float
    setting: Setting
    ours: Options | None
    evidence: Evidence
    exact: Evidence | None = None
    """What plain PyTorch gives in float32, without TF32."""
    rounds: Sequence[tuple[float, float]] = ()
    """The ms on the device and on the host in each of the rounds in which sides took turns."""

    def times(self, other: "Measured", *, host: bool = False) -> float:
        """How many times as long as that of ``other`` a step takes, on the device or the host.

        Where both took turns: the median of the ratios of neighbours in time.
        """
        pairs = [*zip(self.rounds, other.rounds, strict=True)] if self.rounds else []
        if pairs:
            return statistics.median(mine[host] / theirs[host] for mine, theirs in pairs)
        return self.host_ms / other.host_ms if host else self.ms / other.ms

    @property
    def words(self) -> str:
        """What was chosen."""
        options = (self.ours or {}).items()
        return ", ".join([str(self.setting), *(f"{name}={value}" for name, value in options)])


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
        self.weights = [*self.model.parameters()]

    def refill(self) -> None:
        self.x.normal_()

    def step(self) -> Any:
        """As in a loop: gradients are dropped by an optimizer's list of weights."""
        for weight in self.weights:
            weight.grad = None
        bf16 = self.case.precision == "bf16" and self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            loss = self.case.loss(self.model(self.input), self.target)
        with torch.autograd.set_multithreading_enabled(False):  # as hyperslab train does
            loss.backward()
        return loss

    def first_step(self) -> Evidence:
        """Without dropout, whose masks are others in plain PyTorch; on a batch that is always the
        same.
        """
        generator = torch.Generator(self.device).manual_seed(1)
        self.x.copy_(torch.randn(self.x.shape, generator=generator, device=self.device))
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


class TooSlowError(Exception):
    """Not the fastest setting."""


def measure(
    case: Case,
    device: torch.device,
    choices: Sequence[Options | None],
    seconds: float,
    settings: Sequence[Setting] = tuple(SETTINGS),
) -> Measured | str:
    """The fastest setting's figures, each measured for about ``seconds``; else why all failed."""
    best: Measured | None = None
    failures: list[str] = []
    begun = time.perf_counter()
    for setting in settings if device.type == "cuda" else SETTINGS[:1]:
        is_slow = best and best.ms > SLOW_SECONDS * 1e3
        is_very_slow = best and best.ms > VERY_SLOW_SECONDS * 1e3
        if is_very_slow or (setting.benchmark and is_slow):
            break
        if time.perf_counter() - begun > SIDE_SECONDS:
            break
        found = _first_that_runs(case, setting, device, choices, seconds, best)
        if isinstance(found, Measured):
            best = found
        elif found:
            failures.append(found)
        if not release(device):
            break
    return best or (failures or ["no setting could be measured"])[0]


def measure_plain(
    case: Case, device: torch.device, seconds: float, settings: Sequence[Setting]
) -> Measured | str:
    """As ``measure``, of plain PyTorch, with what it gives in float32."""
    found = measure(case, device, [None], seconds, settings)
    if isinstance(found, str):
        return found
    torch.backends.cudnn.benchmark = False
    with float32_products("fp32"):
        exact = Trial(replace(case, precision="fp32"), SETTINGS[0], device, None).first_step()
    release(device)
    return replace(found, exact=exact)


def measure_in_turns(
    case: Case, device: torch.device, sides: Sequence[Measured], seconds: float
) -> list[Measured]:
    """The ``sides`` with times of steps that took turns: a slow moment of the host is slow for all.

    In every round each side runs a block of steps, whose first ones do not count, and whose median
    is the side's time in this round; the next round begins with another side. Garbage of earlier
    measurements is collected before, and what is alive then is not looked at again, so that no side
    pays for the objects of another.

    Only short steps wait for the host; of others the times stay.
    """
    longest = max(side.ms for side in sides)
    if longest > SHORT_SECONDS * 1e3:
        return list(sides)
    num_rounds = min(40, max(3, round(seconds * 1e3 / longest)))
    with float32_products("tf32"):
        trials = [Trial(case, side.setting, device, side.ours) for side in sides]
        with _frozen_objects():
            found = _take_turns(trials, sides, num_rounds)
    release(device)
    return [
        replace(
            side,
            ms=statistics.median(times),
            host_ms=statistics.median(host),
            spread=(min(times), max(times)),
            rounds=[*zip(times, host, strict=True)],
        )
        for side, (times, host) in zip(sides, found, strict=True)
    ]


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Within it, garbage is looked for among new objects alone."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _take_turns(
    trials: Sequence[Trial], sides: Sequence[Measured], num_rounds: int
) -> list[tuple[list[float], list[float]]]:
    """Milliseconds on the device and on the host, one of each for every round."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in trials]
    turns = [*zip(trials, sides, found, strict=True)]
    for trial, side, _ in turns:
        for _ in range(WARM_UP_STEPS):
            run_with(side.setting, trial.first_step)
    for _ in range(num_rounds):
        for trial, side, (times, host) in turns:
            on_device, on_host = run_with(side.setting, _run_block, trial)
            times.append(on_device)
            host.append(on_host)
        turns = [*turns[1:], turns[0]]
    return found


def _run_block(trial: Trial) -> tuple[float, float]:
    """The medians of its steps on the device and on the host."""
    for _ in range(LEAD_STEPS):
        trial.step()
    block = trial.step, BLOCK_STEPS, trial.device, trial.refill
    return statistics.median(device_times(*block)), statistics.median(host_times(*block))


def _first_that_runs(
    case: Case,
    setting: Setting,
    device: torch.device,
    choices: Sequence[Options | None],
    seconds: float,
    best: Measured | None,
) -> Measured | str | None:
    """None where ``best`` is faster; else why the first choice failed."""
    failures: list[str] = []
    for ours in choices:
        try:
            args = case, setting, device, ours, seconds, best
            found = run_with(setting, _measure_setting, *args)
            return found if best is None or found.ms < best.ms else None
        except TooSlowError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever fails is told in the table
            words = (str(error).splitlines() or [""])[0]
            failures.append(f"{setting}: {type(error).__name__}: {words}")
        if not release(device):
            break
    return failures[0]


def release(device: torch.device) -> bool:
    """Gives memory back; false where a kernel has crashed, after which nothing runs any more."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def _measure_setting(
    case: Case,
    setting: Setting,
    device: torch.device,
    ours: Options | None,
    seconds: float,
    best: Measured | None,
) -> Measured:
    limit = TOO_SLOW * best.ms if best else float("inf")
    with float32_products("tf32"):
        trial = Trial(case, setting, device, ours)
        begun = time.perf_counter()
        for _ in range(1 if ours is None else 3):  # of ours the first pass, or two, take other ways
            evidence = trial.first_step()
        if (time.perf_counter() - begun - WARM_UP_SECONDS) * 1e3 > limit:
            raise TooSlowError
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times, host = _times(trial, seconds, limit)
    return Measured(
        statistics.median(times),
        statistics.median(host) if host else None,
        (min(times), max(times)),
        torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        setting,
        ours,
        evidence,
    )


def _times(trial: Trial, seconds: float, limit_ms: float) -> tuple[list[float], list[float]]:
    """Milliseconds of steps on the device and on the host."""
    times = device_times(trial.step, 1, trial.device, trial.refill)
    if times[0] > limit_ms:
        raise TooSlowError
    if times[0] < VERY_SLOW_SECONDS * 1e3:
        least = 2 if times[0] > SLOW_SECONDS * 1e3 else 5
        repeats = min(50, max(least, round(seconds * 1e3 / times[0])))
        times = device_times(trial.step, repeats, trial.device, trial.refill)
    if times[0] > SLOW_SECONDS * 1e3:
        return times, []
    repeats = min(100, max(5, round(500 / times[0])))
    return times, host_times(trial.step, repeats, trial.device, trial.refill)
