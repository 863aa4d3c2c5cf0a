"""``hyperslab.plan``: from a model, a machine and a number of GPUs to the best partition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab.errors import ConfigError, check_choice
from hyperslab.planner.cost import Job, KernelTimes
from hyperslab.planner.machine import PRECISIONS, Machine, known_machines, load_machine
from hyperslab.planner.measured import Calibration, cpu_name, find_calibration
from hyperslab.planner.memory import STATES
from hyperslab.planner.network import Network, load_shipped
from hyperslab.planner.search import Found, check_counts, search

if TYPE_CHECKING:
    from torch import nn

AUTO = "auto"
SOURCES = ("files", "disk", "memory", "none")
ANY_MACHINE = "dgx-h100"
"""What is planned for where nothing else is known."""
CPU_MACHINE = "laptop"


def plan(
    model: nn.Module | Network | str,
    input_shape: Sequence[int] | None = None,
    *,
    gpus: int,
    batch: int = 1,
    machine: Machine | str | Path | None = None,
    precision: str = AUTO,
    optimizer: str = "adam",
    source: str = "memory",
) -> Found:
    """The fastest ways to train ``model`` on ``gpus`` GPUs of ``machine``.

    ``model`` is a module, for samples of ``input_shape`` (channels first, without the batch dim),
    or the name of a preset. The module runs once, on tensors without values: nothing is computed,
    and it does not change. ``batch`` counts the samples of a step over all ranks. ``machine`` is
    one that ``hyperslab plan --help`` names, or a TOML file; left out, this one if it was measured
    by ``hyperslab plan calibrate``, else a DGX H100. ``precision`` is ``fp32``, ``tf32``, ``bf16``
    or ``auto`` (``bf16`` on GPUs, ``fp32`` on CPUs), ``optimizer`` one of ``sgd``, ``momentum``,
    ``adam``, ``adamw`` and ``lamb``, and ``source`` where samples are read from in every step:
    ``files`` of a parallel file system, a ``disk`` of each node, ``memory`` of the ranks, or
    ``none``.

    Printed, it is a table. Its ``best`` goes straight into the rest of hyperslab::

        found = hs.plan(net, (4, 512, 512, 512), gpus=8, machine="dgx-h100", batch=2)
        mesh = hs.init(**found.best.mesh)
        model = hs.parallelize(net, mesh, **found.best.options)
    """
    check_counts(gpus=gpus, batch=batch)
    chosen, measured = find_machine(machine, gpus)
    network = find_network(model, input_shape)
    job = make_job(network, batch, chosen, precision=precision, optimizer=optimizer, source=source)
    return search(job, chosen, gpus, measured)


def make_job(
    network: Network,
    batch: int,
    machine: Machine,
    *,
    precision: str = AUTO,
    optimizer: str = "adam",
    source: str = "memory",
) -> Job:
    check_choice("precision", precision, (AUTO, *PRECISIONS))
    check_choice("optimizer", optimizer, STATES)
    check_choice("source", source, SOURCES)
    if precision == AUTO:
        precision = "fp32" if machine.cores_per_node else "bf16"
    return Job(network, batch, precision, optimizer, source)


def find_machine(
    given: Machine | str | Path | None, ranks: int = 1
) -> tuple[Machine, KernelTimes | None]:
    """The machine, with what was measured on such ones, and the times of kernels on them.

    Where none is given, that of the latest calibration, if there is one.
    """
    if isinstance(given, Machine):
        return given, None
    if given is not None:
        machine = load_machine(given)
        return _with_measured(machine, find_calibration(machine.gpu), ranks)
    latest = find_calibration()
    if latest is None:
        return load_machine(ANY_MACHINE), None
    is_cpu = latest.device == cpu_name()
    return _with_measured(_nearest(None if is_cpu else latest.device), latest, ranks)


def machine_at_hand(gpu: str | None, ranks: int = 1) -> tuple[Machine, KernelTimes | None]:
    """What is known of a machine with such GPUs, or with CPUs alone, and what was measured of it.

    Where nothing was, it is the one that comes nearest.
    """
    return _with_measured(_nearest(gpu), find_calibration(gpu or cpu_name()), ranks)


def _nearest(gpu: str | None) -> Machine:
    if gpu is None:
        return load_machine(CPU_MACHINE)
    machines = [load_machine(name) for name in known_machines()]
    with_gpus = [machine for machine in machines if not machine.cores_per_node]
    words = {*gpu.replace("-", " ").split()}
    return max(with_gpus, key=lambda machine: len(words & {*machine.gpu.split()}))


def _with_measured(
    machine: Machine, calibration: Calibration | None, ranks: int
) -> tuple[Machine, KernelTimes | None]:
    if calibration is None:
        return machine, None
    return calibration.machine(machine, ranks), calibration.kernel_times


def find_network(
    model: nn.Module | Network | str, input_shape: Sequence[int] | None = None
) -> Network:
    if isinstance(model, Network | str):
        network = load_shipped(model) if isinstance(model, str) else model
        if input_shape is not None and tuple(input_shape) != network.input_shape:
            shown = "x".join(map(str, network.input_shape))
            raise ConfigError(
                f"{network.name} is known for samples of {shown}, not "
                f"{'x'.join(map(str, input_shape))}: give the module itself for others"
            )
        return network
    from hyperslab.planner.read_network import read_network  # which loads torch

    if input_shape is None:
        raise ConfigError("input_shape is missing: that of a sample, such as (4, 512, 512, 512)")
    return read_network(model, input_shape)
