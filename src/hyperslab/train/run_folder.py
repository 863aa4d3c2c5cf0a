"""The folder of a run: who may write there, and what is where."""

from __future__ import annotations

import json
import logging
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hyperslab.comm import agree
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.partial import explained_writing, make_folder, partial_file
from hyperslab.train.checkpoint_shelf import find_checkpoints
from hyperslab.train.environment import describe_environment
from hyperslab.train.folder_lock import FolderLock
from hyperslab.train.log_file import to_json

_log = logging.getLogger("hyperslab")

MOST_KEYS = 5
"""That are named when settings differ."""
SHARED_SECONDS = 10
"""So long a network file system may take to show a new folder to all nodes."""


class RunFolder:
    """All that a run writes; made by ``begin``, and locked until ``close``.

    ``config.toml  environment.json  log.jsonl  summary.json  tensorboard/  checkpoints/  figures/
    model.safetensors``
    """

    def __init__(self, path: Path, lock: FolderLock | None = None) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def begin(cls, path: Path, mesh: Mesh, *, resume: bool) -> RunFolder:
        """The folder, ready to be written to; what it cannot be raises on all ranks.

        A folder in which a run has left checkpoints is only taken with ``resume``.

        Collective over all ranks.
        """
        folder, error = cls(Path(path).expanduser()), None
        try:
            if mesh.rank == 0:
                with explained_writing(folder.path):
                    folder._take(resume)
        except (ConfigError, FormatError) as wrong:
            folder.close()
            error = wrong
        agree(error, mesh)
        agree(folder._unseen(mesh), mesh)
        return folder

    def note_start(self, config_toml: str, mesh: Mesh) -> None:
        """Writes down the settings and the environment, once it is sure that the run can begin.

        If settings differ from those before, a warning names them, and both are kept.

        Collective over all ranks.
        """
        error = None
        try:
            if mesh.rank == 0:
                with explained_writing(self.path):
                    self._note_start(config_toml, mesh)
        except FormatError as wrong:
            error = wrong
        agree(error, mesh)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    def last_step(self) -> int | None:
        """The step of the last checkpoint, if there is one."""
        if not self.checkpoints.exists():
            return None
        return max(find_checkpoints(self.checkpoints), default=None)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_text(self.summary, to_json(summary, indent=2) + "\n")

    def close(self) -> None:
        """Lets another run write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, resume: bool) -> None:
        """What rank 0 does alone."""
        make_folder(self.path)
        step = self.last_step()
        if step is None:
            self._check_empty()
        self._lock = FolderLock.take(self.path)
        if step is not None and not resume:
            raise ConfigError(
                f"{self.path} holds a run that reached step {step}: continue it with --resume, or "
                "choose another folder with --folder"
            )
        make_folder(self.figures)

    def _check_empty(self) -> None:
        """Raises rather than write over results, or over files that no run of ours has made."""
        results = [path.name for path in (self.summary, self.weights) if path.exists()]
        ours = (self.config, self.log)
        strange = [path.name for path in ours if path.exists() and not self.environment.exists()]
        if results or strange:
            raise ConfigError(
                f"{self.path} holds {', '.join(results + strange)}, and no checkpoint to go on "
                "from: choose another folder with --folder"
            )

    def _note_start(self, config_toml: str, mesh: Mesh) -> None:
        step = self.last_step()
        if step is not None:
            self._keep_config(config_toml)
        self.summary.unlink(missing_ok=True)  # that of an earlier end
        self._write_environment(mesh, is_first=step is None)
        write_text(self.config, config_toml)

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
        write_text(kept, before)
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
        write_text(self.environment, to_json(content, indent=2) + "\n")

    def _unseen(self, mesh: Mesh) -> Exception | None:
        """Why this rank cannot write where rank 0 does, if so: the folder must be shared."""
        end = time.monotonic() + SHARED_SECONDS
        while not self.figures.exists():
            if time.monotonic() > end:
                return ConfigError(
                    f"rank {mesh.rank} on {os.uname().nodename} does not see {self.path}, which "
                    "rank 0 has made: choose a folder that all nodes share"
                )
            time.sleep(0.1)
        return None


def write_text(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    with partial_file(path) as (_, fd), os.fdopen(os.dup(fd), "w") as file:
        file.write(text)


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
