"""The folder of all checkpoints of a run, as rank 0 sees and changes it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hyperslab.errors import FormatError
from hyperslab.io.partial import WriteError, explained_writing, make_folder
from hyperslab.train.checkpoint_folder import (
    FileSum,
    Manifest,
    read_manifest,
    sync_folder,
    write_manifest,
)

PARTIAL, REPLACED = ".partial", ".replaced"
"""Endings of folders that are no checkpoints: not yet, or no longer."""


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder``, by step, in order."""
    try:
        named = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir()]
    except OSError as error:
        raise FormatError(f"{folder} cannot be read: {error.strerror}") from error
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def best_of(found: Mapping[int, Path], until: int) -> int | None:
    """The last step up to ``until`` that was better than all before it."""
    for step in sorted((step for step in found if step <= until), reverse=True):
        try:
            if read_manifest(found[step]).is_best:
                return step
        except FormatError:  # damaged, so not to be used
            continue
    return None


def make_ready(folder: Path) -> None:
    """Makes the folder, or undoes a replacement that was cut short between its two steps."""
    make_folder(folder)
    for old in folder.glob(f"step_*{REPLACED}"):
        if not (name := old.with_name(old.name.removesuffix(REPLACED))).exists():
            old.rename(name)


def begin(folder: Path, step: int) -> Path:
    """A new folder for what is written at ``step``, which is not yet a checkpoint."""
    beside = folder / f"step_{step:08d}{PARTIAL}"
    with explained_writing(beside):
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir()
    return beside


def finish(manifest: Manifest, files: Mapping[str, FileSum], beside: Path) -> None:
    """Makes a checkpoint of what was written; one of the same step makes way."""
    _check_all_seen(files, beside)
    write_manifest(replace(manifest, files=files), beside)
    target = beside.with_suffix("")
    replaced = target.with_suffix(REPLACED)
    with explained_writing(target):
        sync_folder(beside)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        beside.rename(target)
        sync_folder(target.parent)


def remove_old(folder: Path, newest: int, keep: int) -> None:
    """Leaves the newest ``keep`` up to the one just written, and the best as each knows it."""
    found = find_checkpoints(folder)
    latest = [step for step in found if step <= newest][-keep:]
    kept = {*latest, *(best_of(found, until=step) for step in latest)}
    for path in folder.glob("step_*"):
        if path.suffix in (PARTIAL, REPLACED):
            shutil.rmtree(path, ignore_errors=True)
    for step, path in found.items():
        if step not in kept:
            gone = path.rename(path.with_suffix(PARTIAL))  # no half may look whole
            shutil.rmtree(gone, ignore_errors=True)


def _check_all_seen(files: Mapping[str, FileSum], beside: Path) -> None:
    """Raises if rank 0 does not see the files of the others: a folder on each node's own disk."""
    for name, file in files.items():
        path = beside / name
        if not path.exists() or path.stat().st_size != file.nbytes:
            raise WriteError(
                f"rank 0 does not see {path} of {file.nbytes} bytes, which another rank has "
                "written: choose a run folder on a file system that all nodes share"
            )
