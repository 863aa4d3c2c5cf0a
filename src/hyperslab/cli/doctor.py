"""``hyperslab doctor``: what is here, and whether two ranks can compute together."""

from __future__ import annotations

import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperslab import __version__
from hyperslab.cli.machine import Machine, find_gpus, find_machine
from hyperslab.cli.output import print_result, two_columns
from hyperslab.cli.selftest import Check, run_selftest
from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.partial import shown_nbytes

if TYPE_CHECKING:  # it loads torch
    from hyperslab.comm.launch import Launch

EXAMPLES = """\b
Examples:
  hyperslab doctor
  hyperslab doctor --json | jq .machine
  srun --ntasks=1 --gpus=1 hyperslab doctor
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def doctor(as_json: bool) -> None:
    """Check that this machine is ready.

    Shows versions, devices and the launcher, and runs a self-test: two local processes convolve a
    small tensor together and compare with one process, on CPUs, and on GPUs where there are any.
    They tell how their messages travel and what an exchange of 64 KiB and of 1 MiB costs. Under
    torchrun, srun or mpirun only rank 0 looks around.
    """
    report = begin_report()
    if report.launch and report.launch.rank > 0:
        return
    if report.has_torch:
        with Console(stderr=True).status("Two ranks compute together ..."):
            finish_report(report)
    print_result(report.to_dict(), as_json, _to_table(report))
    if failures := report.failures:
        first = failures[0]
        raise HyperslabError(
            f"{len(failures)} of {len(report.checks)} checks failed: {first.name}: {first.detail}"
        )


def _to_table(report: Report) -> Table:
    table = two_columns()
    for name, version in report.versions.items():
        table.add_row(name, version or "-")
    table.add_row()
    for name, text in _describe_place(report):
        table.add_row(name, Text(text))
    for note in report.notes:
        table.add_row("note", Text(note, style="yellow"))
    table.add_row()
    for check in report.checks:
        word = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        table.add_row(check.name, Text.assemble(word, f"  {check.detail}"))
    return table


def _describe_place(report: Report) -> list[tuple[str, str]]:
    rows = _describe_machine(report.machine) if report.machine else []
    if report.backends:
        here = [name for name, is_here in report.backends.items() if is_here]
        rows.append(("backends", ", ".join(here) or "-"))
    if report.launch:
        rows.append(("launcher", _describe_launch(report.launch)))
    return rows


def _describe_machine(machine: Machine) -> list[tuple[str, str]]:
    gpus = [
        (f"GPU {index}", f"{gpu['name']}, {shown_nbytes(gpu['memory_nbytes'])}")
        for index, gpu in enumerate(machine["gpus"])
    ]
    return [
        ("CPU cores", f"{machine['cpu_cores']:g} usable"),
        ("memory", f"{shown_nbytes(machine['memory_nbytes'])} usable"),
        *gpus,
    ]


def _describe_launch(launch: Launch) -> str:
    if launch.launcher == "alone":
        return "none found, alone"
    return (
        f"{launch.launcher}: rank {launch.rank} of {launch.num_ranks}, {launch.num_local_ranks} on "
        f"this node, rank 0 at {launch.master_addr}:{launch.master_port}"
    )


# What is looked at: versions, machine, launcher, and checks that pass or fail

OLDEST_TORCH = (2, 11)
PACKAGES = ("torch", "numpy", "triton", "h5py", "mpi4py")


@dataclass(kw_only=True)
class Report:
    """What was found; without a usable torch, only its versions and the check that failed."""

    versions: dict[str, str | None]
    """``None`` for what is not installed."""

    checks: list[Check]

    launch: Launch | None = None
    """``None`` if the launcher's variables make no sense; a check has the reason."""

    machine: Machine | None = None

    backends: dict[str, bool] = field(default_factory=dict)
    """Whether ``torch.distributed`` was built with each."""

    notes: list[str] = field(default_factory=list)
    """What is allowed, but perhaps not meant."""

    @property
    def has_torch(self) -> bool:
        return self.checks[0].ok

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def to_dict(self) -> dict[str, Any]:
        checks = [check._asdict() for check in self.checks]
        for check in checks:
            if not check["figures"]:
                del check["figures"]
        return {"ok": not self.failures, **asdict(self), "checks": checks}


def begin_report() -> Report:
    """A report with versions and launcher, which tell whether to go on and on which rank."""
    versions = find_versions()
    report = Report(versions=versions, checks=[check_torch(versions["torch"])])
    if report.has_torch:
        _find_launch(report)
    return report


def _find_launch(report: Report) -> None:
    from hyperslab.comm.launch import find_launch

    try:
        report.launch = find_launch()
    except ConfigError as error:
        report.checks.append(Check("launcher", False, str(error)))


def finish_report(report: Report) -> None:
    """Look at the machine and run all checks, in a report whose torch can be loaded."""
    report.versions |= find_torch_versions()
    report.backends = find_backends()
    report.machine = find_machine()
    _examine_gpus(report, report.machine)
    report.checks += _run_selftests(report, report.machine)


def _examine_gpus(report: Report, machine: Machine) -> None:
    checks = check_gpus()
    report.checks += checks
    if checks and all(check.ok for check in checks):
        machine["gpus"] = find_gpus()
        report.checks += [check_convolutions(index) for index in range(len(machine["gpus"]))]
        report.notes += _find_unreachable(len(machine["gpus"]))
    if not checks:
        report.notes.append(_why_no_gpu())


def _run_selftests(report: Report, machine: Machine) -> list[Check]:
    if not report.backends["gloo"]:
        return [Check("gloo", False, "this torch was built without gloo: install another build")]
    devices = ["cpu", "cuda"] if machine["gpus"] else ["cpu"]
    return [check for device in devices for check in run_selftest(device)]


# Versions


def find_versions() -> dict[str, str | None]:
    """The versions of hyperslab, Python and packages, ``None`` where one is not installed."""
    found: dict[str, str | None] = {"hyperslab": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def check_torch(version: str | None) -> Check:
    """Whether torch is there, new enough, and can be loaded."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    if version is None:
        return Check("torch", False, f"is not installed: pip install 'torch>={oldest}'")
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        return Check(
            "torch", False, f"{version} is too old: pip install --upgrade 'torch>={oldest}'"
        )
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return Check("torch", False, f"{version} cannot be loaded: {error}")
    return Check("torch", True, version)


def find_torch_versions() -> dict[str, str | None]:
    """The version of torch with its build, and those of the GPU libraries that it brings."""
    import torch

    cudnn = torch.backends.cudnn.version()
    nccl = torch.cuda.nccl.version() if find_backends()["nccl"] else None
    return {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": str(cudnn) if cudnn else None,
        "NCCL": ".".join(map(str, nccl)) if nccl else None,
    }


def find_backends() -> dict[str, bool]:
    """Whether torch.distributed was built with each backend."""
    import torch.distributed as dist

    is_here = dist.is_available()
    return {
        "gloo": is_here and dist.is_gloo_available(),
        "nccl": is_here and dist.is_nccl_available(),
        "mpi": is_here and dist.is_mpi_available(),
    }


# GPUs


def check_gpus() -> list[Check]:
    """A check for each GPU that torch sees, or one for all if it cannot use those there."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return [_check_gpu(index) for index in range(torch.cuda.device_count())]
    if torch.version.cuda and _has_nvidia_device():
        reason = str(caught[0].message) if caught else "torch cannot use the driver"
        return [Check("GPU", False, " ".join(reason.split()))]
    return []


def _check_gpu(index: int) -> Check:
    import torch

    try:
        total = torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:  # what torch raises for CUDA's errors
        return Check(f"GPU {index}", False, str(error).strip().partition("\n")[0])
    return Check(f"GPU {index}", total == 8, f"eight ones sum to {total:g}")


def check_convolutions(index: int) -> Check:
    """Whether the GPU's own 3-d convolutions are right; the verdict is kept for later runs."""
    import torch

    from hyperslab.kernels.conv_check import check

    name, verdict = f"GPU {index}: conv3d", check(torch.device("cuda", index))
    if not verdict.errors:
        return Check(name, False, "none could be computed: its memory is full, or each raised")
    if verdict.wrong:
        words = ", ".join(verdict.wrong)
        return Check(
            name,
            False,
            f"{words}: wrong in this cuDNN; hyperslab computes these in float32 or without cuDNN, "
            "other programs do not: install another torch or cuDNN",
        )
    return Check(
        name,
        True,
        f"{len(verdict.errors)} ways to compute in bf16, fp16, TF32 and float32 agree "
        f"({verdict.seconds:.1f} s)",
    )


def _find_unreachable(num_gpus: int) -> list[str]:
    """A note of the GPUs whose ranks cannot write into each other's memory."""
    import torch

    pairs = [
        f"{one} and {other}"
        for one, other in combinations(range(num_gpus), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if not pairs:
        return []
    return [f"ranks on GPUs {', '.join(pairs)} cannot reach each other's memory and use NCCL"]


def _why_no_gpu() -> str:
    import torch

    if _has_nvidia_device() and torch.version.cuda is None:
        return "there is an NVIDIA GPU, but this torch was built for CPUs only"
    return "no GPU: computing on CPUs only"


def _has_nvidia_device() -> bool:
    """Whether there is an NVIDIA GPU, whatever torch thinks of it, that is not hidden."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(Path("/dev").glob("nvidia[0-9]*"))
