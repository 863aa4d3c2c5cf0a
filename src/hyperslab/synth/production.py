"""Many files, made by many processes, each of them once, and whole or not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import h5py
import numpy as np

from hyperslab.errors import ConfigError, FormatError, HyperslabError
from hyperslab.io.spec import shown_shape
from hyperslab.io.workers import worker_processes
from hyperslab.partial import check_capacity, make_folder, partial_file, remove_leftovers

# HDF5 files that are there whole or not at all, and say what they were made with


MADE_WITH = "made_with"
"""The attribute of a file that says with which settings it was made, as JSON."""

Settings = Mapping[str, str | int | float]


@contextmanager
def whole_file(path: Path, settings: Settings) -> Iterator[h5py.File]:
    """A new file to fill; it gets its name when it is whole and on disk, and is gone otherwise."""
    # Without a lock of HDF5's own: the file is locked already.
    with partial_file(path) as (part, _), h5py.File(part, "w", locking=False) as file:
        file.attrs[MADE_WITH] = json.dumps(dict(settings))
        yield file


def is_whole(path: Path, settings: Settings) -> bool:
    """Whether the file is there, made with ``settings``; raises if it is something else."""
    if not path.exists():
        return False
    was = _made_with(path)
    if changed := sorted(name for name in {*was, *settings} if was.get(name) != settings.get(name)):
        there, asked = (
            ", ".join(f"{name}={made.get(name)}" for name in changed) for made in (was, settings)
        )
        raise ConfigError(f"{path} was made with {there}, not {asked}: {_WAYS_OUT}")
    return True


def _made_with(path: Path) -> Settings:
    try:
        with h5py.File(path, "r") as file:
            text = file.attrs.get(MADE_WITH)
    except (OSError, RuntimeError, KeyError) as error:  # as h5py reports damage
        raise FormatError(f"{path} exists and cannot be read ({error}): {_WAYS_OUT}") from error
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise ConfigError(f"{path} was not made by this command: {_WAYS_OUT}") from None


_WAYS_OUT = "choose another folder, or overwrite its files with --overwrite"


SPARE_NBYTES = 2**20
"""Left free for the file system's own use."""


class Recipe(Protocol):
    """How to make a set of files: a small value, sent to the processes that follow it.

    A file depends on the recipe and its own number, not on who makes it or beside which others.
    """

    @property
    def num_files(self) -> int: ...

    @property
    def memory_nbytes(self) -> int:
        """That one process takes while it makes one file."""
        ...

    def file_name(self, index: int) -> str: ...

    def file_nbytes(self, index: int) -> int: ...

    def settings(self, index: int) -> Settings:
        """All that the file's content depends on."""
        ...

    def fill(self, file: h5py.File, index: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SampleFiles:
    """What recipes of one sample a file have in common: file and sample have the same number."""

    prefix: ClassVar[str]
    """With which names of files begin."""
    count: int = 1
    """Samples, in all files."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or self.seed < 0:
            raise ConfigError(f"count must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return self.count

    @property
    def sizes(self) -> Settings:
        """Those of its samples."""
        raise NotImplementedError

    def settings(self, index: int) -> Settings:
        return {"kind": self.prefix, **self.sizes, "seed": self.seed, "index": index}

    def file_name(self, index: int) -> str:
        return f"{self.prefix}_{index:06d}.h5"

    def rng(self, sample: int) -> np.random.Generator:
        """That all of a sample is drawn from."""
        return np.random.default_rng([self.seed, sample])


@dataclass(frozen=True, kw_only=True)
class BatchFiles(SampleFiles):
    """What recipes of images of ``shape``, ``per_file`` of them in a file, have in common."""

    shape: tuple[int, int] = (224, 224)
    per_file: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.per_file < 1 or self.seed < 0:
            raise ConfigError(f"count and per_file must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return -(-self.count // self.per_file)

    def numbers(self, index: int) -> range:
        """Of the images in a file."""
        first = index * self.per_file
        return range(first, min(first + self.per_file, self.count))

    def settings(self, index: int) -> Settings:
        images, size = self.numbers(index), shown_shape(self.shape)
        counts = {"first": images.start, "images": len(images)}
        return {"kind": self.prefix, "size": size, **counts, "seed": self.seed}


def check_size(what: str, shape: Sequence[int], least: int, most: int) -> None:
    """Raises unless samples of ``shape`` can be made."""
    if not least <= min(shape) <= max(shape) <= most:
        raise ConfigError(
            f"the size of {what} must be {least} to {most} along each dim, got {shown_shape(shape)}"
        )


@dataclass(frozen=True, kw_only=True)
class Production:
    """What was made."""

    made: int
    kept: int
    """Files that were there already, whole."""
    nbytes: int
    """Of the files made."""
    seconds: float
    jobs: int


def produce(
    recipe: Recipe,
    folder: Path,
    *,
    jobs: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Production:
    """Makes the files of ``recipe`` that are not yet in ``folder``, on ``jobs`` processes.

    Files are named when they are whole: a run that was broken off is taken up where it was. Raises
    before the first file if they do not fit on the disk.
    """
    start = time.monotonic()
    remove_leftovers([folder])
    todo = [i for i in range(recipe.num_files) if overwrite or not _is_there(recipe, folder, i)]
    nbytes = sum(map(recipe.file_nbytes, todo))
    _check_space(folder, nbytes)
    make_folder(folder)
    kept = recipe.num_files - len(todo)
    on_progress(kept, recipe.num_files)
    jobs = max(1, min(jobs, len(todo)))
    for num_made, _ in enumerate(_make_all(recipe, folder, todo, jobs), kept + 1):
        on_progress(num_made, recipe.num_files)
    seconds = time.monotonic() - start
    return Production(made=len(todo), kept=kept, nbytes=nbytes, seconds=seconds, jobs=jobs)


def _is_there(recipe: Recipe, folder: Path, index: int) -> bool:
    return is_whole(folder / recipe.file_name(index), recipe.settings(index))


def _check_space(folder: Path, nbytes: int) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if nbytes:
        check_capacity(there, nbytes + SPARE_NBYTES, "what is to be made")


def _make_all(recipe: Recipe, folder: Path, todo: Sequence[int], jobs: int) -> Iterator[int]:
    """The numbers of files as they are finished."""
    if jobs == 1:
        for index in todo:
            yield make_file(recipe, folder, index)
        return
    with worker_processes(jobs, [folder]) as submit_all:
        for future in as_completed(submit_all(partial(make_file, recipe, folder), todo)):
            yield _result(future)


def make_file(recipe: Recipe, folder: Path, index: int) -> int:
    """Makes one file, and returns its number."""
    with whole_file(folder / recipe.file_name(index), recipe.settings(index)) as file:
        recipe.fill(file, index)
    return index


def _result(future: Future[int]) -> int:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise HyperslabError(
            "a process that made files ended too early, as happens when memory runs out: use fewer "
            "--jobs, and run the same command again to make what is missing"
        ) from error
