"""One checkpoint: a folder of tensors, and a list of what belongs to it.

``manifest.json`` holds all that is no tensor, where the tensors belong, and the size and checksum
of every other file. Those are torch's: ``.metadata`` tells where in them each tensor lies.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hyperslab.errors import FormatError
from hyperslab.partial import explained_writing, sync, write_file
from hyperslab.train.checkpoint_state import TENSOR, Tree, leaves

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
    with _told_by_torch(folder):
        save(
            dict(tensors),
            storage_writer=PlainWriter(folder, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def write_manifest(manifest: Manifest, folder: Path) -> None:
    body = {"format": FORMAT, "torch": str(torch.__version__), **asdict(manifest)}
    write_file(folder / MANIFEST, json.dumps({"crc32": _crc_of(body), **body}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint holds, as it was written."""
    path = folder / MANIFEST
    try:
        with open_in(folder, MANIFEST) as file:
            body = json.loads(file.read())
        is_ours, crc = body["format"] == FORMAT, body.pop("crc32")
    except FileNotFoundError:
        raise FormatError(f"{folder} is no checkpoint: it has no {MANIFEST}; {ADVICE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} cannot be read ({error}): {ADVICE}") from error
    if not is_ours or crc != _crc_of(body):
        why = "is damaged" if is_ours else f"is not of the kind {FORMAT!r}"
        raise FormatError(f"{path} {why}: {ADVICE}")
    try:
        return _checked_manifest(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is not to be used ({error}): {ADVICE}") from error


def _checked_manifest(body: Mapping[str, Any]) -> Manifest:
    """Raises for names that lead out of the folder, and for tensors that would not be read."""
    files = {name: FileSum(**each) for name, each in body["files"].items()}
    for name in files:
        if not re.fullmatch(r"\.?\w[\w.-]*", name):
            raise ValueError(f"it lists {name!r}, which is not the name of a file beside it")
    paths = [leaf[TENSOR] for leaf in leaves(body["trees"])]
    if twice := [path for path, num in Counter(paths).items() if num > 1]:
        raise ValueError(f"{twice[0]} stands for more than one tensor")
    return Manifest(int(body["step"]), bool(body["is_best"]), dict(body["trees"]), files)


def open_in(folder: Path, name: str) -> BufferedReader:
    """File ``name`` of ``folder`` itself; a link, which may lead anywhere, is refused."""
    path = folder / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # no waiting for a pipe
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FormatError(f"{path} is a link: put the file itself there, or {ADVICE}") from error
    file = os.fdopen(fd, "rb")
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return file
    file.close()
    raise FormatError(f"{path} is not a plain file: {ADVICE}")


def sum_files(paths: Iterable[Path]) -> dict[str, FileSum]:
    """The sizes and checksums of files, by name."""
    found = {}
    for path in paths:
        with open_in(path.parent, path.name) as file:
            found[path.name] = _sum(file)
    return found


def check_files(folder: Path, expected: Mapping[str, FileSum]) -> None:
    """Raises unless the files in ``folder`` are as they were written."""
    for name, was in expected.items():
        path = folder / name
        try:
            with open_in(folder, name) as file:
                size = os.fstat(file.fileno()).st_size
                found = _sum(file) if size == was.nbytes else FileSum(size, 0)
        except OSError as error:
            raise FormatError(f"{path} cannot be read ({error.strerror}): {ADVICE}") from error
        if found != was:
            cut = f"it has {size} bytes of {was.nbytes}"
            why = cut if size != was.nbytes else "its bytes are not those that were written"
            raise FormatError(f"{path} is damaged: {why}; {ADVICE}")


def sync_folder(folder: Path) -> None:
    """Puts the names in ``folder`` on the disk."""
    with explained_writing(folder):
        sync(folder)


class PlainWriter(FileSystemWriter):
    """Leaves all bytes on the disk, or says what the operating system said, which torch hides."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # torch syncs it while its bytes are still in a buffer of this process.
        sync(Path(self.path) / METADATA)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _sum(file: BufferedReader) -> FileSum:
    buffer, nbytes, crc = memoryview(bytearray(BLOCK_NBYTES)), 0, 0
    while count := file.readinto(buffer):
        nbytes, crc = nbytes + count, crc32(buffer[:count], crc)
    return FileSum(nbytes, crc)


def _crc_of(body: Mapping[str, Any]) -> int:
    return crc32(json.dumps(body).encode())


@contextmanager
def _told_by_torch(folder: Path) -> Iterator[None]:
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
            f"{folder} could not be written: {type(cause).__name__} on rank {rank}: {words}"
        ) from error
