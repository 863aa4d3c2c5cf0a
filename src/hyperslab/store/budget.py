"""How much memory and disk the store may take."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hyperslab.errors import ConfigError

MEMORY_SHARE = 0.5
"""Of the free memory of the node; the rest is for the model and the page cache."""
DISK_SHARE = 0.5

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_nbytes(size: int | float | str) -> int:
    """The bytes that ``size`` means: a number of them, or words such as ``80GiB`` or ``512M``.

    >>> parse_nbytes("1.5 GiB"), parse_nbytes("2kB"), parse_nbytes(7)
    (1610612736, 2048, 7)
    """
    if isinstance(size, int | float):
        number, unit = float(size), ""
    else:
        found = re.fullmatch(r"\s*([\d.]+)\s*([kKmMgGtT]?)(?:i?[bB])?\s*", size)
        if not found or found[1].count(".") > 1 or found[1] == ".":
            raise ConfigError(f"{size!r} is not a size in bytes, such as 80GiB or 512M")
        number, unit = float(found[1]), found[2].upper()
    if not 0 <= number < 2**63:
        raise ConfigError(f"a size in bytes cannot be {size!r}")
    return int(number * _UNITS[unit])


def free_memory(root: Path = Path("/")) -> int:
    """The bytes that this process may still take: of the machine, or of its control group."""
    return max(0, min([_free_of_machine(root), *_free_of_groups(root)]))


def _free_of_machine(root: Path) -> int:
    try:
        text = (root / "proc/meminfo").read_text()
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_of_groups(root: Path) -> Iterator[int]:
    """What each group around this process has left; pages of files can be given up."""
    for controller, limit, usage in _MEMORY_FILES:
        for folder in cgroup_folders(root, controller):
            try:
                allowed = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                text = (folder / "memory.stat").read_text()
            except (OSError, ValueError):  # no limit is the word "max"
                continue
            fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
            files = fields.get("inactive_file", fields.get("total_inactive_file", "0"))
            yield allowed - used + int(files)


_MEMORY_FILES = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Of control groups, version 2 and 1: the controller, and the files with limit and usage."""


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Those of this process's control group and of all around it.

    ``root`` is where ``/proc`` and ``/sys`` are found. ``controller`` is empty in version 2, which
    has one tree for all.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            here = Path(path.lstrip("/"))
            tree = root / "sys/fs/cgroup" / controller
            return [tree / folder for folder in (here, *here.parents)]
    return []


def free_disk(folder: Path) -> int:
    """The bytes that may still be written to ``folder``; none where it is memory in disguise."""
    return 0 if is_memory(folder) else shutil.disk_usage(folder).free


def is_memory(folder: Path) -> bool:
    """Whether ``folder`` lies on a file system that keeps its files in memory."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    real = folder.resolve()
    kinds = {Path(fields[1]): fields[2] for line in mounts if len(fields := line.split()) > 2}
    around = [point for point in kinds if point == real or point in real.parents]
    deepest = max(around, key=lambda point: len(point.parts), default=None)
    return deepest is not None and kinds[deepest] in ("tmpfs", "ramfs")
