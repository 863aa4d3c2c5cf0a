"""What the doctor looks at: versions, machine, launcher, and checks that pass or fail."""

from __future__ import annotations

import json
import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab import __version__
from hyperslab.cli.machine import Machine, find_gpus, find_machine
from hyperslab.cli.selftest import Check, run_selftest
from hyperslab.errors import ConfigError

if TYPE_CHECKING:  # it loads torch, which may be broken: the doctor is to say so
    from hyperslab.comm.launch import Launch

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

    def to_json(self) -> str:
        checks = [check._asdict() for check in self.checks]
        for check in checks:
            if not check["figures"]:
                del check["figures"]
        content = asdict(self) | {"checks": checks}
        return json.dumps({"ok": not self.failures, **content}, indent=2)


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
    found: dict[str, str | None] = {
        "hyperslab": __version__,
        "python": platform.python_version(),
    }
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
