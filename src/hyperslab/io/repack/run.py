"""Many files rewritten at once, and none twice."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.meter import Meter, Progress
from hyperslab.io.partial import check_capacity, make_folder, remove_leftovers
from hyperslab.io.repack.estimate import estimated_ratio
from hyperslab.io.repack.plan import (
    COMPRESSIONS,
    ArrayPlan,
    filter_options,
    plan_arrays,
    plan_targets,
)
from hyperslab.io.repack.workers import run_jobs
from hyperslab.io.repack.write import Done, Job, is_done
from hyperslab.layout import Grid


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
    if compression not in COMPRESSIONS:
        raise ConfigError(f"compression is one of {', '.join(COMPRESSIONS)}, not {compression!r}")
    if dataset.tilings:
        raise ConfigError("whole files are repacked: cut into tiles what was written, not before")
    filter_options(compression)
    began, out = time.perf_counter(), Path(directory)
    plans = plan_arrays(dataset, grid, chunks, channels_first=channels_first)
    targets = plan_targets(dataset.paths, out)
    for folder in {target.parent for target in targets.values()}:
        make_folder(folder)
    remove_leftovers({target.parent for target in targets.values()})
    options = {**dataset.options, "sample": dataset.spec.name}
    work = [Job(source, target, options, plans, compression) for source, target in targets.items()]
    todo = [job for job in work if not is_done(job)]
    sizes = _sizes(dataset)
    total = sum(sizes[job.source] for job in todo)
    if todo:
        ratio = estimated_ratio(dataset, plans, compression)
        check_capacity(out, round(total * ratio), f"repacking {len(todo)} files (by estimate)")
    done = run_jobs(todo, jobs, Meter(total, progress))
    return _report(out, plans, compression, work, done, total, time.perf_counter() - began)


def _sizes(dataset: Dataset) -> dict[Path, int]:
    """The bytes of the arrays of each file."""
    specs = dataset.arrays.values()
    one = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    return {path: one * num for path, num in zip(dataset.paths, dataset.counts, strict=True)}


def _report(
    out: Path,
    plans: tuple[ArrayPlan, ...],
    compression: str,
    work: Sequence[Job],
    done: Sequence[Done],
    total: int,
    seconds: float,
) -> RepackReport:
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
        seconds=seconds,
    )
