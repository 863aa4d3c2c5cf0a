"""Checkpoints of a run: written in the background, whole or not at all, read on any mesh."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperslab.comm.failure_report import contact_beside_passes
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel, ask_first, do_on_first, do_together
from hyperslab.errors import ConfigError, FormatError, HyperslabError
from hyperslab.partial import WriteError, explained_writing, make_folder
from hyperslab.trace import Category, active
from hyperslab.trace.recorder import Place
from hyperslab.train.checkpoint_folder import (
    METADATA,
    FileSum,
    Manifest,
    check_files,
    read_manifest,
    sum_files,
    sync_folder,
    write_manifest,
    write_tensors,
)
from hyperslab.train.checkpoint_state import (
    Parts,
    Tree,
    destinations,
    load_state,
    put_together,
    state_of,
    take_apart,
)
from hyperslab.train.checkpoint_tensors import read_index, read_tensors

VALUES = "values"
"""The part that ``load`` returns."""

PARTIAL, REPLACED = ".partial", ".replaced"
"""Endings of folders that are no checkpoints: not yet, or no longer."""


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder``, by step, in order."""
    try:
        named = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir()]
    except OSError as error:
        raise FormatError(f"{folder} cannot be read: {error.strerror}") from error
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def choose_step(found: Mapping[int, Path], step: int | None, folder: Path) -> int:
    """``step``, or that of the newest checkpoint of those ``found`` in ``folder``."""
    if not found:
        raise FormatError(f"there is no checkpoint in {folder}")
    if step is not None and step not in found:
        there = ", ".join(map(str, found))
        raise ConfigError(f"there is no checkpoint of step {step} in {folder}: {there}")
    return max(found) if step is None else step


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


def begin_folder(folder: Path, step: int) -> Path:
    """A new folder for what is written at ``step``, which is not yet a checkpoint."""
    beside = folder / f"step_{step:08d}{PARTIAL}"
    with explained_writing(beside):
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir()
    return beside


def finish_folder(manifest: Manifest, files: Mapping[str, FileSum], beside: Path) -> None:
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


def remove_old(folder: Path, newest: int, keep: int, since: int | None = None) -> None:
    """Leaves the newest ``keep`` up to the one just written, and the best as each knows it.

    Those from the step ``since`` on stay too.
    """
    found = find_checkpoints(folder)
    latest = [step for step in found if step <= newest][-keep:]
    latest += [step for step in found if since is not None and since <= step <= newest]
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


class Checkpoints:
    """The checkpoints in ``folder``, of which the newest ``keep`` and the best stay.

    Each is a folder ``step_00000100``. It has that name only when all ranks have written their part
    and all of it is on the disk. The folder must be one that all ranks see.

    All methods are collective over all ranks, and errors are the same on all.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"at least 1 checkpoint must be kept, got keep={keep}")
        self._folder, self._mesh, self._keep = folder, mesh, keep
        self._channel = SideChannel(mesh, "working on checkpoints")
        self.since: int | None = None
        """Checkpoints from this step on stay too, however many they are."""
        self._writer: threading.Thread | None = None
        self._error: HyperslabError | None = None
        self._best: int | None = None
        """The step that was said to be the best, and stays it when it is saved again."""
        do_on_first(lambda: make_ready(folder), self._channel)

    def free_channel(self) -> SideChannel:
        """Between all ranks, for who calls nothing else here meanwhile."""
        self.wait()
        return self._channel

    # Writing

    def save(self, step: int, parts: Parts, *, is_best: bool = False) -> None:
        """Copies the state of ``parts`` and writes it while training goes on.

        Replicated weights are written by one rank each, sharded ones by the ranks that hold them,
        and values as rank 0 has them. Waits for the checkpoint before it, and raises its error.
        Checkpoints of later steps, which a run that went back has left behind, are removed.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        trees = {
            name: take_apart(state_of(part, parts), name, tensors) for name, part in parts.items()
        }
        shared = {name for name, part in parts.items() if isinstance(part, nn.Module | Optimizer)}
        mine = {
            path: tensor.detach().to("cpu", copy=True)
            for path, tensor in _share(tensors, shared, self._mesh).items()
        }
        self._best = step if is_best else self._best
        manifest = Manifest(step, step == self._best, trees)
        self._writer = threading.Thread(
            target=self._write,
            args=(manifest, mine, active.place_here()),
            name="hyperslab-checkpoint",
        )
        self._writer.start()

    def wait(self) -> None:
        """Returns when the last checkpoint is on the disk; raises if it could not be written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits for the last checkpoint."""
        try:
            self.wait()
        finally:
            self._channel.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except HyperslabError as later:
            if error is None:
                raise
            error.add_note(str(later))

    # Reading

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        self.wait()
        return [*ask_first(self._find_all, self._channel)]

    def latest(self) -> int | None:
        """The step of the newest checkpoint, if there is one."""
        return max(self.steps(), default=None)

    def load(self, parts: Parts, step: int | None = None) -> dict[str, Any]:
        """Gives ``parts`` the state they had at ``step``, or at the newest; returns the values.

        They may be on another mesh, and their weights sharded where they were replicated, or the
        other way round. Parts that are not given stay in the checkpoint.

        A checkpoint that is damaged is a ``FormatError`` (one before it may do, see ``steps``), one
        that does not fit is a ``ConfigError``. ``parts`` may have changed by then.
        """
        folder = self._find(step)
        manifest = do_together(lambda: self._checked(folder), self._channel)
        wanted = {name: part for name, part in parts.items() if name != VALUES} | {VALUES: None}
        trees = do_together(lambda: _trees(manifest, wanted, folder), self._channel)
        index = do_together(lambda: read_index(folder, manifest), self._channel)
        tensors: dict[str, Tensor] = {}
        for name, tree in trees.items():
            tensors |= do_together(partial(destinations, wanted[name], tree, parts), self._channel)
        do_together(lambda: read_tensors(tensors, index, folder), self._channel)
        states = {name: put_together(tree, tensors) for name, tree in trees.items()}
        values = states.pop(VALUES, {})
        self._best = manifest.step if manifest.is_best else None
        for name, state in states.items():
            do_together(partial(load_state, parts[name], state, parts), self._channel)
        return dict(values)

    def _find_all(self) -> dict[int, Path]:
        return find_checkpoints(self._folder)

    def _find(self, step: int | None) -> Path:
        self.wait()
        found = ask_first(self._find_all, self._channel)
        return found[choose_step(found, step, self._folder)]

    def _checked(self, folder: Path) -> Manifest:
        """What the checkpoint holds; each rank looks whether some of its files are as written."""
        manifest = read_manifest(folder)
        names = sorted(manifest.files)[self._mesh.rank :: self._mesh.num_ranks]
        check_files(folder, {name: manifest.files[name] for name in names})
        return manifest

    # In the background

    def _write(
        self, manifest: Manifest, tensors: Mapping[str, Tensor], place: Place | None
    ) -> None:
        """Writes a checkpoint; what goes wrong is raised by the next call, on all ranks alike."""
        folder = self._folder / f"step_{manifest.step:08d}"
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with active.placed(place), active.around(Category.checkpoint, "write", nbytes):
            self._write_to(folder, manifest, tensors)

    def _write_to(self, folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        try:
            beside = ask_first(lambda: begin_folder(self._folder, manifest.step), self._channel)
            files = self._write_files(tensors, beside)
            do_on_first(lambda: finish_folder(manifest, files, beside), self._channel)
            do_on_first(lambda: self._remove_old(manifest.step), self._channel)
        except Exception as error:  # noqa: BLE001 - none may get lost with its thread
            kind = type(error) if isinstance(error, HyperslabError) else FormatError
            self._error = kind(f"the checkpoint {folder} was not written: {error}")
            if self._mesh.rank == 0:
                shutil.rmtree(folder.with_suffix(PARTIAL), ignore_errors=True)

    def _remove_old(self, newest: int) -> None:
        remove_old(self._folder, newest, self._keep, self.since)

    def _write_files(self, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, FileSum]:
        """The files that all ranks wrote, by name."""
        with contact_beside_passes("writing a checkpoint", self._mesh), explained_writing(folder):
            write_tensors(tensors, folder, self._channel.group)
        names = [f"__{self._mesh.rank}_*", *([METADATA] if self._mesh.rank == 0 else [])]
        own = do_together(
            lambda: sum_files(path for name in names for path in folder.glob(name)), self._channel
        )
        return {
            name: each for theirs in self._channel.tell_all(own) for name, each in theirs.items()
        }


def _share(tensors: Mapping[str, Tensor], shared: set[str], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors that this rank writes: about as many bytes on each rank.

    Of a DTensor, which knows who holds what, each rank writes its piece. Every rank has all others
    and comes to the same result. Those that do not belong to the ``shared`` parts may differ
    between ranks; they are rank 0's.
    """
    loads = [0] * mesh.num_ranks
    mine = {}
    for path, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        owner = 0
        if isinstance(tensor, DTensor):
            owner = mesh.rank
        elif path.partition("/")[0] in shared:
            owner = loads.index(min(loads))
            loads[owner] += tensor.nbytes
        if owner == mesh.rank:
            mine[path] = tensor
    return mine


def _trees(manifest: Manifest, wanted: Parts, folder: Path) -> dict[str, Tree]:
    for name in wanted:
        if name != VALUES and name not in manifest.trees:
            there = ", ".join(manifest.trees)
            raise ConfigError(f"{folder} holds no {name!r}: it holds {there}")
    return {name: manifest.trees[name] for name in wanted if name in manifest.trees}
