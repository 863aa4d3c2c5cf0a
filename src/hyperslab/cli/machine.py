"""What this process may use of the machine: cores, memory, GPUs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from hyperslab.store.budget import cgroup_folders


class Gpu(TypedDict):
    """One GPU as torch sees it."""

    name: str
    memory_nbytes: int


class Machine(TypedDict):
    """What a process here may use; limits of its container or job count."""

    cpu_cores: float
    memory_nbytes: int
    gpus: list[Gpu]


def find_machine() -> Machine:
    """The cores and memory that affinity and cgroups leave to this process; no GPUs yet."""
    return Machine(cpu_cores=_count_cores(), memory_nbytes=_find_memory(), gpus=[])


def find_gpus() -> list[Gpu]:
    """All GPUs that torch sees."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(name=gpu.name, memory_nbytes=gpu.total_memory) for gpu in gpus]


def _count_cores() -> float:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *read_cpu_quotas()])


def _find_memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *read_memory_limits()])


def read_cpu_quotas(root: Path = Path("/")) -> list[float]:
    """The cores that each cgroup around this process may keep busy, where it has a limit.

    ``root`` is where ``/proc`` and ``/sys`` are found.
    """
    periods = _read_all(root, "cpu", "cpu.cfs_period_us")
    v1 = zip(_read_all(root, "cpu", "cpu.cfs_quota_us"), periods, strict=True)
    v2 = [text.split() for text in _read_all(root, "", "cpu.max")]
    return [
        int(quota) / int(period)
        for quota, period in (*v1, *v2)
        if quota.strip() not in ("-1", "max")
    ]


def read_memory_limits(root: Path = Path("/")) -> list[int]:
    """The bytes that each cgroup around this process may hold, where it has a limit."""
    v1 = _read_all(root, "memory", "memory.limit_in_bytes")
    v2 = _read_all(root, "", "memory.max")
    return [int(text) for text in (*v1, *v2) if text.strip() != "max"]


def _read_all(root: Path, controller: str, name: str) -> Iterator[str]:
    """The text of file ``name`` in this process's cgroup and in all around it.

    ``controller`` is empty in version 2, which has one tree for all.
    """
    for folder in cgroup_folders(root, controller):
        try:
            yield (folder / name).read_text()
        except OSError:  # the root has no limits, and a container may hide the rest
            continue
