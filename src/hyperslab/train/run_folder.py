"""The folder of a run: who may write there, what is where, and in what environment it began."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

import hyperslab
from hyperslab.comm.agree import run_on_all
from hyperslab.comm.launch import find_launch
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.partial import explained_writing, make_folder, write_file
from hyperslab.trace.file import SUFFIX
from hyperslab.trace.merge import FOLDER as TRACE
from hyperslab.train.checkpoints import find_checkpoints
from hyperslab.train.process import user_command
from hyperslab.train.weight_files import find_weights

_log = logging.getLogger("hyperslab")

MOST_KEYS = 5
"""That are named when settings differ."""
SHARED_SECONDS = 10
"""So long a network file system may take to show a new folder to all nodes."""


class RunFolder:
    """All that a run writes; made by ``begin``, and locked until ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.log = path / "log.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.figures = path / "figures"
        self.tensorboard = path / "tensorboard"
        self.trace = path / TRACE
        self.weights = path / "model.safetensors"
        self._lock: FolderLock | None = None

    @classmethod
    def begin(cls, path: Path, mesh: Mesh, *, resume: bool) -> RunFolder:
        """The folder, ready to be written to; what it cannot be raises on all ranks.

        A folder in which a run has left checkpoints is only taken with ``resume``.

        Collective over all ranks.
        """
        folder = cls(Path(path).expanduser())
        try:
            run_on_all(lambda: folder._take(resume) if mesh.rank == 0 else None, mesh)
            run_on_all(lambda: folder._check_seen(mesh), mesh)
        except HyperslabError:
            folder.close()
            raise
        return folder

    def note_start(self, config_toml: str, mesh: Mesh) -> None:
        """Writes down the settings and the environment, once it is sure that the run can begin.

        If settings differ from those before, a warning names them, and both are kept.

        Collective over all ranks.
        """
        run_on_all(lambda: self._note_start(config_toml, mesh) if mesh.rank == 0 else None, mesh)

    def last_step(self) -> int | None:
        """The step of the last checkpoint, if there is one."""
        if not self.checkpoints.exists():
            return None
        return max(find_checkpoints(self.checkpoints), default=None)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_file(self.summary, to_json(summary, indent=2) + "\n")

    def close(self) -> None:
        """Lets another run write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, resume: bool) -> None:
        """What rank 0 does alone."""
        with explained_writing(self.path):
            make_folder(self.path)
            step = self.last_step()
            if step is None:
                self._check_empty()
            self._lock = FolderLock.take(self.path)
            if step is not None and not resume:
                raise ConfigError(
                    f"{self.path} holds a run that reached step {step}: continue it with "
                    "--resume, or choose another folder with --folder"
                )
            if step is None:
                for trace in self.trace.glob(
                    f"*{SUFFIX}"
                ):  # of one that left nothing to go on from
                    trace.unlink(missing_ok=True)
            make_folder(self.figures)

    def _check_empty(self) -> None:
        """Raises rather than write over results, or over files that no run of ours has made."""
        results = [
            path.name
            for path in (self.summary, find_weights(self.weights))
            if path and path.exists()
        ]
        ours = (self.config, self.log)
        strange = [path.name for path in ours if path.exists() and not self.environment.exists()]
        if results or strange:
            raise ConfigError(
                f"{self.path} holds {', '.join(results + strange)}, and no checkpoint to go on "
                "from: choose another folder with --folder"
            )

    def _note_start(self, config_toml: str, mesh: Mesh) -> None:
        with explained_writing(self.path):
            step = self.last_step()
            if step is not None:
                self._keep_config(config_toml)
            self.summary.unlink(missing_ok=True)  # that of an earlier end
            self._write_environment(mesh, is_first=step is None)
            write_file(self.config, config_toml)

    def _keep_config(self, config_toml: str) -> None:
        """Tells how the settings differ from those of the run that is continued; keeps those."""
        before = config_toml
        if self.config.exists():
            before = self.config.read_text(errors="replace")
        if not (changes := _changes(before, config_toml)):
            return
        number = 1
        while (kept := self.path / f"config.{number}.toml").exists():
            number += 1
        write_file(kept, before)
        more = f" and {len(changes) - MOST_KEYS} more" if len(changes) > MOST_KEYS else ""
        _log.warning(
            "%s goes on with other settings: %s%s (those before are in %s)",
            self.path,
            ", ".join(changes[:MOST_KEYS]),
            more,
            kept.name,
        )

    def _write_environment(self, mesh: Mesh, *, is_first: bool) -> None:
        """That of this start; those of earlier starts stay with it."""
        earlier = [] if is_first else _read_starts(self.environment)
        content = {**describe_environment(mesh), "earlier": earlier}
        write_file(self.environment, to_json(content, indent=2) + "\n")

    def _check_seen(self, mesh: Mesh) -> None:
        """Raises if this rank cannot write where rank 0 does: the folder must be shared."""
        end = time.monotonic() + SHARED_SECONDS
        while not self.figures.exists():
            if time.monotonic() > end:
                raise ConfigError(
                    f"rank {mesh.rank} on {os.uname().nodename} does not see {self.path}, which "
                    "rank 0 has made: choose a folder that all nodes share"
                )
            time.sleep(0.1)


def to_json(values: Mapping[str, Any], **how: Any) -> str:
    return json.dumps(without_nan(values), allow_nan=False, **how)


def without_nan(value: Any) -> Any:
    """``value`` as JSON can hold it, with None for what is no finite number."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def _changes(before: str, after: str) -> list[str]:
    """The settings that differ, such as ``train.epochs = 20 (was 10)``."""
    old, new = _settings(before), _settings(after)
    return [
        f"{key} = {_shown(new, key)} (was {_shown(old, key)})"
        for key in dict.fromkeys([*new, *old])
        if new.get(key) != old.get(key)
    ]


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "not set"


def _settings(text: str) -> dict[str, Any]:
    """The values of a TOML text by their full keys; none if it is damaged."""
    try:
        return dict(_flat(tomllib.loads(text)))
    except tomllib.TOMLDecodeError:
        return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_starts(path: Path) -> list[Any]:
    """What the file tells of the last start and of those before it; nothing if it is damaged."""
    try:
        content = json.loads(path.read_text())
        earlier = content.pop("earlier", [])
        return [*earlier, content]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


# Where and with what a run was started, to understand it later

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


# A lock on a folder, so that two runs do not write into one

LOCK = ".lock"


class Holder(NamedTuple):
    """The process that took a lock, as it has written into the file."""

    host: str
    pid: int

    @property
    def may_live(self) -> bool:
        """Of other hosts nobody here can tell."""
        return self.host != platform.node() or Path(f"/proc/{self.pid}").exists()


class FolderLock:
    """Held through an open file, so that the system releases it however the process ends.

    Where the file system has no locks, the name of the holder decides.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._pid = os.getpid()

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Raises ``ConfigError`` if another run has it."""
        path = folder / LOCK
        with explained_writing(path):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                _check_free(fd, path)
                _write(fd, json.dumps(Holder(platform.node(), os.getpid())))
            except BaseException:
                os.close(fd)
                raise
        return cls(fd)

    def release(self) -> None:
        if self._fd is not None and self._pid == os.getpid():  # not in a fork
            with suppress(OSError):
                _write(self._fd, "")
            os.close(self._fd)
        self._fd = None

    def __del__(self) -> None:
        self.release()


def _check_free(fd: int, path: Path) -> None:
    holder, advice = _holder(fd), ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks
        if holder is None or not holder.may_live:
            return
        advice = f"; if it is gone, remove {path}"
    who = f"process {holder.pid} on {holder.host}" if holder else "just started"
    raise ConfigError(
        f"another run writes into {path.parent} ({who}): stop it, or choose another folder with "
        f"--folder{advice}"
    )


def _holder(fd: int) -> Holder | None:
    try:
        host, pid = json.loads(os.pread(fd, 1000, 0))
    except (ValueError, TypeError):
        return None
    return Holder(str(host), int(pid))


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)
