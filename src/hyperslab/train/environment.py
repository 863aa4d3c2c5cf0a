"""Where and with what a run was started, to understand it later."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime
from typing import Any

import torch

import hyperslab
from hyperslab.comm.launch import find_launch
from hyperslab.comm.mesh import Mesh
from hyperslab.train.command_line import user_command

PACKAGES = ("numpy", "h5py", "safetensors", "pytorch_optimizer")
GIT_SECONDS = 5


def describe_environment(mesh: Mesh) -> dict[str, Any]:
    """Versions, machine, launcher, mesh, code and command line, as JSON can hold them."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": user_command(),
        "folder": os.getcwd(),  # noqa: PTH109 - a text
        "git": _git(),
        "host": platform.node(),
        "platform": platform.platform(),
        "pid": os.getpid(),
        "versions": _versions(),
        "gpu": _gpu(mesh),
        "launcher": find_launch().launcher,
        "num_ranks": mesh.num_ranks,
        "mesh": mesh.grid.describe(),
        "device": str(mesh.device),
        "backend": mesh.backend,
    }


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "hyperslab": hyperslab.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(mesh: Mesh) -> dict[str, Any] | None:
    if mesh.device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(mesh.device)
    return {"name": found.name, "memory_nbytes": found.total_memory}


def _git() -> dict[str, Any] | None:
    """The commit of the folder that the run was started in, and whether files differ from it."""
    commit = _ask_git("rev-parse", "HEAD")
    if not commit:
        return None
    changed = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_changed": None if changed is None else bool(changed)}


def _ask_git(*words: str) -> str | None:
    try:
        said = subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()
