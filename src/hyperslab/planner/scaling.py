"""The inverse questions: how many GPUs, how large a batch, how long a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hyperslab.errors import ConfigError
from hyperslab.planner.cost import Job, KernelTimes
from hyperslab.planner.machine import Machine
from hyperslab.planner.search import Candidate, Found, has_fitting, search

MOST_GPUS = 4096
MOST_DRAWN = 256
"""Curves go on to twice the GPUs that were asked for, up to as many."""


def fewest_gpus(job: Job, machine: Machine, most: int = MOST_GPUS) -> int | None:
    """On which the job fits, in whole nodes where one is not enough; None if ``most`` do not."""
    enough = 1
    while not has_fitting(job, machine, enough):
        enough *= 2
        if enough > most:
            return None
    unit = machine.gpus_per_node if enough > machine.gpus_per_node else 1
    between = range(enough // 2 // unit * unit + unit, enough, unit)
    return next((gpus for gpus in between if has_fitting(job, machine, gpus)), enough)


def largest_batch(job: Job, machine: Machine, gpus: int) -> int | None:
    """The samples of a step that fit, up to those of the job; None if not even one does."""
    fits, fails = 0, job.batch + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if has_fitting(replace(job, batch=middle), machine, gpus):
            fits = middle
        else:
            fails = middle
    return fits or None


def best_gpus(
    job: Job,
    machine: Machine,
    efficiency: float,
    most: int = 512,
    measured: KernelTimes | None = None,
) -> Found:
    """For the most GPUs, a power of two, that have that share of ideal speed."""
    if not 0 < efficiency <= 1:
        raise ConfigError(f"efficiency must be above 0 and at most 1, got {efficiency:g}")
    trials = [search(job, machine, gpus, measured, recut=False) for gpus in _powers(most)]
    fitting = [trial for trial in trials if trial.candidates]
    if not fitting:
        raise ConfigError(trials[-1].sentence)
    good = [trial for trial in fitting if trial.efficiency(trial.best) >= efficiency]
    if not good:
        top = max(fitting, key=lambda trial: trial.efficiency(trial.best))
        raise ConfigError(
            f"no number of GPUs up to {most} has {efficiency:.0%} of ideal speed: the most is "
            f"{top.efficiency(top.best):.0%}, on {top.gpus}"
        )
    return search(job, machine, good[-1].gpus, measured)


def _powers(most: int) -> Iterator[int]:
    gpus = 1
    while gpus <= most:
        yield gpus
        gpus *= 2


# Curves


@dataclass(frozen=True)
class Point:
    """The best that as many GPUs can do."""

    gpus: int
    batch: int
    best: Candidate | None
    """None where nothing fits."""

    @property
    def samples_per_second(self) -> float | None:
        return None if self.best is None else self.best.samples_per_second


def strong_scaling(found: Found) -> list[Point]:
    """The same batch on other numbers of GPUs."""
    return [_point(found, gpus, found.job.batch) for gpus in _counts(found.gpus)]


def weak_scaling(found: Found) -> list[Point]:
    """A batch that grows with the GPUs."""
    batch = found.job.batch
    counts = [gpus for gpus in _counts(found.gpus) if batch * gpus % found.gpus == 0]
    return [_point(found, gpus, batch * gpus // found.gpus) for gpus in counts]


def _point(found: Found, gpus: int, batch: int) -> Point:
    if (gpus, batch) != (found.gpus, found.job.batch):
        job = replace(found.job, batch=batch)
        found = search(job, found.machine, gpus, found.measured, recut=False)
    return Point(gpus, batch, found.candidates[0] if found.candidates else None)


def _counts(gpus: int) -> Sequence[int]:
    """Halves down to an odd number, 1, and twice as many."""
    counts = {1, gpus}
    if gpus * 2 <= MOST_DRAWN:
        counts.add(gpus * 2)
    while gpus % 2 == 0:
        gpus //= 2
        counts.add(gpus)
    return sorted(counts)


# A whole run


@dataclass(frozen=True)
class Run:
    """What training takes."""

    steps: int
    hours: float
    gpu_hours: float


def training_run(found: Found, samples: int, epochs: int) -> Run:
    """Of ``epochs`` passes over ``samples``, without evaluation and checkpoints."""
    steps = -(-samples // found.job.batch) * epochs
    hours = steps * found.best.step_seconds / 3600
    return Run(steps, hours, hours * found.gpus)
