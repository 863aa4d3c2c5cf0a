"""``mesh=auto``: the planner chooses the mesh of a run, and is then compared with what happens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist

from hyperslab.comm.agree import run_on_all
from hyperslab.comm.failure_report import contact
from hyperslab.comm.join import init
from hyperslab.comm.launch import find_launch
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.pages import shown_seconds
from hyperslab.planner.cost import KernelTimes
from hyperslab.planner.machine import Machine
from hyperslab.planner.memory import STATES
from hyperslab.planner.planning import machine_at_hand, make_job
from hyperslab.planner.read_network import read_network
from hyperslab.planner.report import rows_of, shown_parts
from hyperslab.planner.search import Candidate, Found, search
from hyperslab.train.config import Config, MeshConfig
from hyperslab.train.model import build_without_values

FIRST, LAST = 11, 20
"""The steps that are measured: those before warm up."""


@dataclass
class Forecast:
    """Compares the time of steps with what was predicted."""

    step_seconds: float
    device: torch.device
    _times: list[float] = field(default_factory=list)

    def after_step(self) -> str | None:
        """A line after the last step that is measured; waits for the device until then."""
        if len(self._times) >= LAST:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._times.append(time.perf_counter())
        if len(self._times) < LAST:
            return None
        late = self._times[FIRST - 2 :]
        measured = median(after - before for before, after in pairwise(late))
        return (
            f"Planner: predicted {shown_seconds(self.step_seconds)} a step, measured "
            f"{shown_seconds(measured)} (median of steps {FIRST} to {LAST}): predicted / measured "
            f"= {self.step_seconds / measured:.2f}"
        )


@dataclass(frozen=True)
class Choice:
    """What the planner has chosen."""

    config: Config
    """With its mesh, and what it computes twice or cuts in other ways."""
    lines: list[str]
    """What it chose, and why."""
    forecast: Forecast


def init_mesh(config: MeshConfig) -> Mesh:
    """The mesh of a configuration; left to the planner, at first that of whole samples.

    Collective over all ranks.
    """
    settings = asdict(config)
    del settings["auto"]
    return init(**settings)


def choose_mesh(config: Config, mesh: Mesh, data: Dataset) -> Choice:
    """Has rank 0 plan for the ranks of ``mesh``; all take its choice.

    Collective over all ranks.
    """
    told = [run_on_all(lambda: _plan(config, mesh, data) if mesh.rank == 0 else None, mesh)]
    if mesh.backend is not None:
        with contact("hearing the planner's choice of rank 0", mesh):
            dist.broadcast_object_list(told, src=0, group=mesh.group)
    assert told[0] is not None
    best, lines = told[0]
    accumulated = config.train.accumulate * best.step_seconds
    return Choice(_with(config, best), lines, Forecast(accumulated, mesh.device))


def _with(config: Config, best: Candidate) -> Config:
    """``config`` with the choice, beside what the user asks for."""
    train, axes = config.train, cast(Any, best.mesh)
    if best.depth_first:
        train = replace(train, depth_first=best.depth_first)
    names = (*train.checkpoint_activations, *best.checkpointed)
    return replace(
        config,
        mesh=replace(config.mesh, auto=False, **axes),
        train=replace(train, checkpoint_activations=names),
        plan=config.plan or best.plan,
    )


def _plan(config: Config, mesh: Mesh, data: Dataset) -> tuple[Candidate, list[str]]:
    """The best that there is, and words for it."""
    machine, measured = _machine(mesh)
    model, settings = config.model, config.train
    job = make_job(
        read_network(build_without_values(model), data.shape, model.name),
        config.data.batch_size // settings.accumulate,
        machine,
        precision="fp32" if settings.precision == "fp64" else settings.precision,
        optimizer=config.optimizer.name if config.optimizer.name in STATES else "adam",
        source="memory" if config.data.store == "memory" else "files",
    )
    job = replace(job, recorded=settings.cuda_graphs is not False and ":" not in model.name)
    is_free = not config.plan and not settings.shard_weights
    found = search(job, machine, mesh.num_ranks, measured, recut=is_free)
    best = (*found.candidates, *found.infeasible)[:1]
    if not best:
        raise ConfigError(f"mesh.auto: {found.sentence}")
    return best[0], [*_tell(found, best[0], machine, is_measured=measured is not None)]


def _machine(mesh: Mesh) -> tuple[Machine, KernelTimes | None]:
    """This one: as many ranks on a node as were started, with the memory that each has."""
    launch, properties = find_launch(), None
    local = launch.num_local_ranks if launch.num_ranks == mesh.num_ranks else mesh.num_ranks
    if mesh.device.type == "cuda":
        properties = torch.cuda.get_device_properties(mesh.device)
    machine, measured = machine_at_hand(properties.name if properties else None, local)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local
    if properties:
        memory = float(properties.total_memory)
    cores = 0 if properties else len(os.sched_getaffinity(0))
    return replace(
        machine, gpus_per_node=local, memory_nbytes=memory, cores_per_node=cores
    ), measured


def _tell(found: Found, best: Candidate, machine: Machine, *, is_measured: bool) -> Iterator[str]:
    others = [each for each, _ in rows_of(found, 2)][1:]
    after = f"; next is {others[0]}, {shown_seconds(others[0].step_seconds)}" if others else ""
    yield (
        f"Planner: {best} is best for {found.gpus} rank{'s' * (found.gpus > 1)}: "
        f"{shown_seconds(best.step_seconds)} a step predicted ({shown_parts(best)}){after}"
    )
    if best.why_not:
        yield f"Warning: the planner finds that it {best.why_not}"
    if not is_measured:
        yield (
            f"Planner: this machine was not measured, and is taken for {machine.name}; "
            "hyperslab plan calibrate measures it"
        )
