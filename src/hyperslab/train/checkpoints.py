"""Checkpoints of a run: written in the background, whole or not at all, read on any mesh."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperslab.comm.failure import contact
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel
from hyperslab.errors import CommError, ConfigError, FormatError, HyperslabError
from hyperslab.io.partial import WriteError, explained_writing, make_folder
from hyperslab.train.checkpoint_folder import (
    FileSum,
    Manifest,
    check_files,
    read_manifest,
    read_tensors,
    sum_files,
    sync_folder,
    write_manifest,
    write_tensors,
)
from hyperslab.train.parts import Parts, destinations, load_state, state_of
from hyperslab.train.state_tree import Tree, put_together, take_apart

Result = TypeVar("Result")

VALUES = "values"
"""The part that ``load`` returns."""

PARTIAL, REPLACED = ".partial", ".replaced"
"""Endings of folders that are no checkpoints: not yet, or no longer."""


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
        self._channel = SideChannel(mesh, "writing a checkpoint")
        self._writer: threading.Thread | None = None
        self._error: HyperslabError | None = None
        self._best: int | None = None
        """The step that was said to be the best, and stays it when it is saved again."""
        self._on_first(lambda: _make_ready(folder))

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
            target=self._write, args=(manifest, mine), name="hyperslab-checkpoint"
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            return self.close()
        try:
            self.close()
        except HyperslabError as later:
            error.add_note(str(later))
        return None

    # Reading

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        self.wait()
        return self._told_by_first(lambda: [*find_checkpoints(self._folder)])

    def latest(self) -> int | None:
        """The step of the newest checkpoint, if there is one."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the checkpoint that was saved last with ``is_best``, if there is one."""
        latest = self.latest()
        if latest is None:
            return None
        return self._told_by_first(lambda: _best(find_checkpoints(self._folder), until=latest))

    def load(self, parts: Parts, step: int | None = None) -> dict[str, Any]:
        """Gives ``parts`` the state they had at ``step``, or at the newest; returns the values.

        They may be on another mesh, and their weights sharded where they were replicated, or the
        other way round. Parts that are not given stay in the checkpoint.

        A checkpoint that is damaged is a ``FormatError`` (one before it may do, see ``steps``), one
        that does not fit is a ``ConfigError``. ``parts`` may have changed by then.
        """
        folder = self._find(step)
        manifest = self._together(lambda: self._checked(folder))
        wanted = {name: part for name, part in parts.items() if name != VALUES} | {VALUES: None}
        trees = self._together(lambda: _trees(manifest, wanted, folder))
        tensors: dict[str, Tensor] = {}
        for name, tree in trees.items():
            tensors |= self._together(partial(destinations, wanted[name], tree, parts))
        with contact("reading a checkpoint", self._mesh):
            read_tensors(tensors, folder, self._channel.group)
        states = {name: put_together(tree, tensors) for name, tree in trees.items()}
        values = states.pop(VALUES, {})
        self._best = manifest.step if manifest.is_best else None
        for name, state in states.items():
            self._together(partial(load_state, parts[name], state, parts))
        return dict(values)

    def _find(self, step: int | None) -> Path:
        steps = self.steps()
        if not steps:
            raise FormatError(f"there is no checkpoint in {self._folder}")
        if step is not None and step not in steps:
            shown = ", ".join(map(str, steps))
            raise ConfigError(f"there is no checkpoint of step {step} in {self._folder}: {shown}")
        return self._told_by_first(
            lambda: find_checkpoints(self._folder)[max(steps) if step is None else step]
        )

    def _checked(self, folder: Path) -> Manifest:
        """What the checkpoint holds; each rank looks whether some of its files are as written."""
        manifest = read_manifest(folder)
        names = sorted(manifest.files)[self._mesh.rank :: self._mesh.num_ranks]
        check_files(folder, {name: manifest.files[name] for name in names})
        return manifest

    # In the background

    def _write(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Writes a checkpoint; what goes wrong is raised by the next call, on all ranks alike."""
        target = self._folder / f"step_{manifest.step:08d}"
        beside = target.with_name(target.name + PARTIAL)
        try:
            self._on_first(lambda: _begin(beside))
            files = self._write_files(tensors, beside)
            self._on_first(lambda: _finish(manifest, files, beside, target))
            self._on_first(lambda: _remove_old(self._folder, manifest.step, self._keep))
        except HyperslabError as error:
            self._error = type(error)(f"the checkpoint {target} was not written: {error}")
            if self._mesh.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)

    def _write_files(self, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, FileSum]:
        """The files that all ranks wrote, by name."""
        with contact("writing a checkpoint", self._mesh), explained_writing(folder):
            write_tensors(tensors, folder, self._channel.group)
        names = [f"__{self._mesh.rank}_*", *([".metadata"] if self._mesh.rank == 0 else [])]
        own = self._together(
            lambda: sum_files(path for name in names for path in folder.glob(name))
        )
        return {
            name: each for theirs in self._channel.tell_all(own) for name, each in theirs.items()
        }

    # Ranks that do the same, or fail alike

    def _on_first(self, call: Callable[[], Result]) -> None:
        """Runs ``call`` on rank 0; its error is raised on all ranks."""
        self._together(call if self._mesh.rank == 0 else lambda: None)

    def _told_by_first(self, call: Callable[[], Result]) -> Result:
        """What ``call`` returns on rank 0."""
        result: list[Result] = []
        self._on_first(lambda: result.append(call()))
        return self._channel.tell_all(result)[0][0]

    def _together(self, call: Callable[[], Result]) -> Result:
        """What ``call`` returns; an error that it raises on one rank is raised on all of them."""
        result, fault, cause = _attempt(call)
        faults = [each for each in self._channel.tell_all(fault) if each]
        if faults:
            raise faults[0].kind(faults[0].words) from cause
        return cast(Result, result)


class _Fault(NamedTuple):
    """An error as it travels between ranks."""

    kind: type[HyperslabError]
    words: str


def _attempt(
    call: Callable[[], Result],
) -> tuple[Result | None, _Fault | None, Exception | None]:
    try:
        return call(), None, None
    except HyperslabError as error:
        return None, _Fault(type(error), str(error)), error
    except OSError as error:
        return None, _Fault(WriteError, f"{error.filename}: {error.strerror}"), error
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        return None, _Fault(CommError, f"{type(error).__name__}: {error}"), error


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


# The folder, as rank 0 sees and changes it


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder``, by step, in order."""
    try:
        named = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir()]
    except OSError as error:
        raise FormatError(f"{folder} cannot be read: {error.strerror}") from error
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def _best(found: Mapping[int, Path], until: int) -> int | None:
    for step in sorted((step for step in found if step <= until), reverse=True):
        try:
            if read_manifest(found[step]).is_best:
                return step
        except FormatError:  # damaged, so not to be used
            continue
    return None


def _make_ready(folder: Path) -> None:
    """Makes the folder, or undoes a replacement that was cut short between its two steps."""
    make_folder(folder)
    for old in folder.glob(f"step_*{REPLACED}"):
        if not (name := old.with_name(old.name.removesuffix(REPLACED))).exists():
            old.rename(name)


def _begin(beside: Path) -> None:
    with explained_writing(beside):
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir()


def _finish(manifest: Manifest, files: Mapping[str, FileSum], beside: Path, target: Path) -> None:
    """Gives the checkpoint its name; one of the same step that has it makes way."""
    _check_all_seen(files, beside)
    write_manifest(replace(manifest, files=files), beside)
    replaced = target.with_name(target.name + REPLACED)
    with explained_writing(target):
        sync_folder(beside)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        beside.rename(target)
        sync_folder(target.parent)


def _check_all_seen(files: Mapping[str, FileSum], beside: Path) -> None:
    """Raises if rank 0 does not see the files of the others: a folder on each node's own disk."""
    for name, file in files.items():
        path = beside / name
        if not path.exists() or path.stat().st_size != file.nbytes:
            raise WriteError(
                f"rank 0 does not see {path} of {file.nbytes} bytes, which another rank has "
                "written: choose a run folder on a file system that all nodes share"
            )


def _remove_old(folder: Path, newest: int, keep: int) -> None:
    """Leaves the newest ``keep`` up to the one just written, and the best as each knows it."""
    found = find_checkpoints(folder)
    latest = [step for step in found if step <= newest][-keep:]
    kept = {*latest, *(_best(found, until=step) for step in latest)}
    for path in folder.glob("step_*"):
        if path.suffix in (PARTIAL, REPLACED):
            shutil.rmtree(path, ignore_errors=True)
    for step, path in found.items():
        if step not in kept:
            gone = path.rename(path.with_name(path.name + PARTIAL))  # no half may look whole
            shutil.rmtree(gone, ignore_errors=True)
