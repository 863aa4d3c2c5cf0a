"""One checkpoint: a folder of tensors, and a list of what belongs to it.

``manifest.json`` holds all that is no tensor, where the tensors belong, and the size and checksum
of every other file. Those are torch's: ``.metadata`` tells where in them each tensor lies.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hyperslab.errors import FormatError
from hyperslab.io.partial import explained_writing, partial_file
from hyperslab.train.state_tree import Tree

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = "hyperslab checkpoint 1"
BLOCK_NBYTES = 8 << 20
ADVICE = "remove this checkpoint to go on from the one before it"


@dataclass(frozen=True)
class FileSum:
    """The size of a file and the CRC-32 of its bytes."""

    nbytes: int
    crc: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    is_best: bool
    """Whether it was better than all before it."""
    trees: Mapping[str, Tree]
    """The parts, by name."""
    files: Mapping[str, FileSum] = field(default_factory=dict)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Writes tensors of all ranks into ``folder``; those that are cut, each rank its piece.

    Collective over ``group``.
    """
    with _told_by_torch("written", folder):
        save(
            dict(tensors),
            storage_writer=PlainWriter(folder, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Fills ``tensors``, which may be cut in another way than those in ``folder``.

    Collective over ``group``.
    """
    with _told_by_torch("read", folder):
        load(
            dict(tensors),
            storage_reader=PlainReader(folder),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def write_manifest(manifest: Manifest, folder: Path) -> None:
    body = {"format": FORMAT, "torch": str(torch.__version__), **asdict(manifest)}
    text = json.dumps({"crc32": _crc_of(body), **body}, indent=1)
    with partial_file(folder / MANIFEST) as (_, fd), os.fdopen(fd, "w", closefd=False) as file:
        file.write(text)


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint holds, as it was written."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        is_ours, crc = body["format"] == FORMAT, body.pop("crc32")
    except FileNotFoundError:
        raise FormatError(f"{folder} is no checkpoint: it has no {MANIFEST}; {ADVICE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} cannot be read ({error}): {ADVICE}") from error
    if not is_ours or crc != _crc_of(body):
        why = "is damaged" if is_ours else f"is not of the kind {FORMAT!r}"
        raise FormatError(f"{path} {why}: {ADVICE}")
    files = {name: FileSum(**each) for name, each in body["files"].items()}
    return Manifest(body["step"], body["is_best"], body["trees"], files)


def sum_files(paths: Iterable[Path]) -> dict[str, FileSum]:
    """The sizes and checksums of files, by name."""
    return {path.name: _sum_file(path) for path in paths}


def check_files(folder: Path, expected: Mapping[str, FileSum]) -> None:
    """Raises unless the files in ``folder`` are as they were written."""
    for name, was in expected.items():
        path = folder / name
        try:
            size = path.stat().st_size
            found = _sum_file(path) if size == was.nbytes else FileSum(size, 0)
        except OSError as error:
            raise FormatError(f"{path} cannot be read ({error.strerror}): {ADVICE}") from error
        if found != was:
            cut = f"it has {size} bytes of {was.nbytes}"
            why = cut if size != was.nbytes else "its bytes are not those that were written"
            raise FormatError(f"{path} is damaged: {why}; {ADVICE}")


def sync_folder(folder: Path) -> None:
    """Puts the names in ``folder`` on the disk."""
    with explained_writing(folder):
        _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class PlainWriter(FileSystemWriter):
    """Leaves all bytes on the disk, or says what the operating system said, which torch hides."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # torch syncs it while its bytes are still in a buffer of this process.
        _sync(Path(self.path) / METADATA)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


class PlainReader(FileSystemReader):
    """Reads what torch wrote without running what a pickle might hold."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that describe tensors in files, and no others."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._NAMES or self._describes(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def _describes(self, module: str, name: str) -> bool:
        """Whether it is a class of torch's descriptions, rather than something they import."""
        if module not in self._MODULES or "." in name:
            return False
        found = super().find_class(module, name)
        return isinstance(found, type) and found.__module__ == module


def _sum_file(path: Path) -> FileSum:
    buffer, nbytes, crc = memoryview(bytearray(BLOCK_NBYTES)), 0, 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            nbytes, crc = nbytes + count, crc32(buffer[:count], crc)
    return FileSum(nbytes, crc)


def _crc_of(body: Mapping[str, Any]) -> int:
    return crc32(json.dumps(body).encode())


@contextmanager
def _told_by_torch(doing: str, folder: Path) -> Iterator[None]:
    """Within it, torch's error about many ranks is the first of theirs, in one line."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unin")
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda each: each[0])
        if isinstance(cause, OSError):
            raise cause from error
        words = str(cause).partition("\n")[0]
        raise FormatError(
            f"{folder} could not be {doing}: {type(cause).__name__} on rank {rank}: {words}"
        ) from error
