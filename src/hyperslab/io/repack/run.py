"""Many files rewritten at once, and none twice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import h5py

from hyperslab.errors import ConfigError, check_choice
from hyperslab.io.copying import Meter, Progress
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.reader import STACKED
from hyperslab.io.repack.plan import (
    COMPRESSIONS,
    ArrayPlan,
    filter_options,
    plan_arrays,
    plan_targets,
)
from hyperslab.io.repack.write import Done, Job, is_done, repack_file
from hyperslab.io.workers import worker_processes
from hyperslab.layout import Box, Grid, Span
from hyperslab.partial import WriteError, check_capacity, make_folder, partials, remove_leftovers

NUM_CHUNKS = 4
"""Compressed to estimate how small all will be."""
MARGIN = 1.2
"""What other files may need beyond what the first tells."""
POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class RepackReport:
    """What was written, and how fast."""

    directory: str
    arrays: tuple[ArrayPlan, ...]
    compression: str
    num_files: int
    num_written: int
    num_kept: int
    """That were there already, made of the same source in the same way."""
    nbytes_in: int
    """Of the source files that were read."""
    nbytes_out: int
    """Of the files written for them."""
    memory_nbytes: int
    """Of the arrays in them, not compressed."""
    left_out: tuple[str, ...]
    seconds: float

    @property
    def ratio(self) -> float:
        """How many times smaller the files are than their arrays in memory."""
        return self.memory_nbytes / self.nbytes_out if self.nbytes_out else 1.0

    @property
    def bandwidth(self) -> float:
        """Bytes of arrays a second, each read, written and read back."""
        return self.memory_nbytes / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "bytes_per_second": self.bandwidth}


def repack(
    dataset: Dataset,
    directory: str | Path,
    *,
    grid: Grid | None = None,
    chunks: Sequence[int] | None = None,
    compression: str = COMPRESSIONS[0],
    channels_first: bool = False,
    jobs: int = 1,
    progress: Progress | None = None,
) -> RepackReport:
    """Rewrites the files of ``dataset`` to HDF5 files in ``directory``, in chunks that fit boxes.

    What else an HDF5 source holds is copied as it is. A file has another name until it is whole, is
    read back and compared; those that are there already, of the same source and options, are kept.

    Args:
        dataset: All of its files are rewritten, with all their samples.
        directory: Is made if it is not there.
        grid: The ranks that will read: no chunk has parts of two ranks' boxes where that can be.
            Left out, chunks are cubes, which serve any mesh.
        chunks: The shape of a chunk of the sample, in the order of dims as written.
        compression: One of ``COMPRESSIONS``.
        channels_first: Writes the dims in the order C, D, H, W; else they keep their order.
        jobs: Processes, each of which rewrites one file at a time; 0 does it in this one.
        progress: Is told how many bytes of arrays are done, and of how many.
    """
    check_choice("compression", compression, COMPRESSIONS)
    if dataset.tilings:
        raise ConfigError("whole files are repacked: cut into tiles what was written, not before")
    if len(dataset.manifest.sources) > 1:
        raise ConfigError(
            f"arrays {list(dataset.arrays)} lie in several files, which are not repacked together: "
            "repack each dataset, then put one beside the other"
        )
    filter_options(compression)
    began, out = time.perf_counter(), Path(directory)
    plans = plan_arrays(dataset, grid, chunks, channels_first=channels_first)
    targets = plan_targets(dataset.paths, out)
    for folder in {target.parent for target in targets.values()}:
        make_folder(folder)
    remove_leftovers({target.parent for target in targets.values()})
    options = _options(dataset)
    work = [Job(source, target, options, plans, compression) for source, target in targets.items()]
    todo = [job for job in work if not is_done(job)]
    one_sample = sum(spec.nbytes for spec in dataset.arrays.values())
    sizes = {file.path: one_sample * file.num_rows for file in dataset.manifest.files}
    total = sum(sizes[job.source] for job in todo)
    if todo:
        ratio = estimated_ratio(dataset, plans, compression)
        check_capacity(out, round(total * ratio), f"repacking {len(todo)} files (by estimate)")
    done = run_jobs(todo, jobs, Meter(total, progress))
    return RepackReport(
        directory=str(out),
        arrays=plans,
        compression=compression,
        num_files=len(work),
        num_written=len(done),
        num_kept=len(work) - len(done),
        nbytes_in=sum(each.nbytes_in for each in done),
        nbytes_out=sum(each.nbytes_out for each in done),
        memory_nbytes=total,
        left_out=tuple(dict.fromkeys(what for each in done for what in each.left_out)),
        seconds=time.perf_counter() - began,
    )


def _options(dataset: Dataset) -> dict[str, Any]:
    """What ``hyperslab.open`` is told to open one of the files like all of them."""
    (source,) = dataset.manifest.sources
    targets = [spec.name for spec in source.whole[1:] if spec.name != dataset.stats]
    axes = {
        spec.name: STACKED * spec.axes.stacked + spec.axes.letters
        for spec in source.whole
        if spec.axes.letters
    }
    found = {"sample": dataset.spec.name, "target": targets, "axes": axes, "stats": dataset.stats}
    return {**found, "format": source.opening.format, **source.opening.options}


def estimated_ratio(dataset: Dataset, plans: Sequence[ArrayPlan], compression: str) -> float:
    """The bytes on disk for a byte in memory, from a few chunks of the first file."""
    plan = plans[0]
    if compression == "none" or plan.chunks is None or not len(dataset):
        return 1.0
    options = filter_options(compression)
    reader = dataset.reader(0, plan.name)
    total = stored = 0
    for number in range(NUM_CHUNKS):
        box = _chunk_at(plan, reader.shape, (number + 0.5) / NUM_CHUNKS)
        data = empty_aligned(box.shape, reader.dtype)
        reader.read(box, data)
        total += data.nbytes
        stored += _stored_nbytes(data.transpose(plan.order), options)
    return min(1.0, MARGIN * stored / total)


def _chunk_at(plan: ArrayPlan, shape: Sequence[int], place: float) -> Box:
    """A chunk that lies ``place`` of the way along each dim, in the source's order."""
    assert plan.chunks is not None
    spans = {}
    for dim, length in zip(plan.order, plan.chunks, strict=True):
        start = math.floor(shape[dim] * place) // length * length
        spans[dim] = Span(start, min(shape[dim], start + length))
    return Box(tuple(spans[dim] for dim in range(len(shape))))


def _stored_nbytes(data: Any, options: dict[str, Any]) -> int:
    with h5py.File("estimate.h5", "w", driver="core", backing_store=False) as file:
        new = file.create_dataset("data", data=data, chunks=data.shape, **options)
        return int(new.id.get_storage_size())


def run_jobs(jobs: Sequence[Job], num_processes: int, meter: Meter) -> list[Done]:
    """Does ``jobs``; the first error stops the rest. Nothing half-written is left behind.

    The HDF5 library may crash over a damaged file: another process, not this one, then dies of it.
    With 0 processes the work is done here.
    """
    if not num_processes or not jobs:
        return [repack_file(job, meter.add) for job in jobs]
    counter = get_context("spawn").Value("q", 0)
    num = min(num_processes, len(jobs))
    with worker_processes(num, _folders(jobs), partial(_begin, counter)) as submit_all:
        try:
            return _collect(submit_all(_run, jobs), counter, meter)
        except BrokenProcessPool as error:
            raise WriteError(_failure_report(jobs)) from error


def _failure_report(jobs: Sequence[Job]) -> str:
    """What to say of a process that died, by what it has left."""
    left = {path.name for folder in _folders(jobs) for path in partials(folder)}
    busy = [
        str(job.source)
        for job in jobs
        if any(name.startswith(f".{job.target.name}.") for name in left)
    ]
    return (
        f"a process that repacked {' or '.join(busy) or 'files'} was killed or crashed: there may "
        "be too little memory (use fewer jobs), or a file may be damaged"
    )


def _folders(jobs: Sequence[Job]) -> set[Path]:
    return {job.target.parent for job in jobs}


def _collect(futures: list[Future[Done]], counter: Synchronized[int], meter: Meter) -> list[Done]:
    waiting = set(futures)
    while waiting:
        ready, waiting = wait(waiting, POLL_SECONDS)
        for future in ready:
            future.result()
        meter.add(counter.value - meter.done)
    return [future.result() for future in futures]


# In the processes


_counter: Any = None


def _begin(counter: Synchronized[int]) -> None:
    global _counter
    _counter = counter


def _run(job: Job) -> Done:
    return repack_file(job, _advance)


def _advance(nbytes: int) -> None:
    with _counter.get_lock():
        _counter.value += nbytes
