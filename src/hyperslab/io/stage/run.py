"""Staging: many files at once, each whole or not there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.copying import Meter, Progress, SourceIdentity, identities_of
from hyperslab.io.dataset import Dataset
from hyperslab.io.partial import (
    WriteError,
    check_capacity,
    make_folder,
    partial_nbytes,
    remove_leftovers,
)
from hyperslab.io.reader import ArrayReader
from hyperslab.io.stage.unit import (
    Unit,
    Written,
    array_name,
    copy_name,
    find_record,
    plan_units,
    remove_older,
    write_record,
)
from hyperslab.io.stage.write import copy_file, write_array
from hyperslab.layout import Box

THREADS = 8
"""Files staged at once: a shared file system answers many requests faster than one."""


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What was staged, and how fast."""

    directory: str
    num_files: int
    """Source files that were asked for."""
    num_staged: int
    """Of these, now."""
    num_kept: int
    """Of these, whole already."""
    failed: Mapping[str, str]
    """Files that could not be staged, with the reason."""
    nbytes: int
    """Written now."""
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_second": self.bandwidth}


def stage(
    dataset: Dataset,
    directory: str | Path,
    *,
    boxes: Mapping[str, Box] | None = None,
    samples: Sequence[int] | None = None,
    part: tuple[int, int] = (0, 1),
    threads: int = THREADS,
    verify: bool = False,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> StageReport:
    """Copies samples to ``directory``, from where ``open_staged`` reads them.

    A file of which all is needed is copied as it is; of others the boxes are written, not
    compressed. Every file is written under another name, read back from the disk, compared, and
    then renamed; what is whole already stays. Any number of processes may stage into one directory.

    Args:
        dataset: Where the samples are.
        directory: Is made if it is not there.
        boxes: By the name of the array, what is needed of each sample, channels first; arrays that
            are not named are needed whole.
        samples: Those needed; all, if left out.
        part: ``(i, n)`` stages the i-th of n shares, for n processes that share the work; what
            the others stage is there when they have returned.
        threads: Files staged at once.
        verify: Compares the checksums of files that are there already, not their sizes alone.
        skip_bad: Goes on after a file that cannot be read, and lists it in the report.
        progress: Is told how many bytes are done, and of how many.
    """
    number, num_parts = part
    if not 0 <= number < num_parts or threads < 1:
        raise ConfigError(f"part {part} is none, or {threads} threads are not enough")
    folder, began = Path(directory), time.perf_counter()
    if folder.resolve() in {path.resolve().parent for path in dataset.paths}:
        raise ConfigError(f"{folder} has the files that are to be staged: name another directory")
    units = plan_units(dataset, boxes, samples)
    make_folder(folder)
    remove_leftovers([folder])
    remove_older(units, folder)
    missing = {
        unit.name: unit
        for unit in units
        if isinstance(find_record(unit, folder, verify=verify), str)
    }
    # What others are writing at this moment is part of what is missing.
    needed = sum(unit.disk_nbytes for unit in missing.values()) - partial_nbytes(folder)
    check_capacity(folder, needed, f"staging {len(missing)} of {len(units)} files")
    mine = units[number::num_parts]
    todo = [unit for unit in mine if unit.name in missing]
    meter = Meter(sum(unit.disk_nbytes for unit in todo), progress)
    failed = _stage_all(dataset, todo, folder, threads, meter, skip_bad)
    return StageReport(
        directory=str(folder),
        num_files=len(mine),
        num_staged=len(todo) - len(failed),
        num_kept=len(mine) - len(todo),
        failed=failed,
        nbytes=meter.done,
        seconds=time.perf_counter() - began,
    )


def _stage_all(
    dataset: Dataset,
    units: Sequence[Unit],
    folder: Path,
    threads: int,
    meter: Meter,
    skip_bad: bool,
) -> dict[str, str]:
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(threads, "hyperslab-stage") as pool:
        work = {pool.submit(_stage_unit, dataset, unit, folder, meter): unit for unit in units}
        try:
            for future in as_completed(work):
                try:
                    future.result()
                except FormatError as error:
                    if not skip_bad or isinstance(error, WriteError):
                        raise
                    failed[str(work[future].path)] = str(error)
        except BaseException:  # also by Ctrl-C
            meter.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def _stage_unit(dataset: Dataset, unit: Unit, folder: Path, meter: Meter) -> None:
    readers = [dataset.reader(unit.index, spec.name) for spec in unit.specs]
    sources = identities_of(readers)
    copied = _copied(dataset, unit, readers, folder, meter)
    files = copied or {
        (name := array_name(unit, spec.name)): write_array(
            dataset, unit, spec, folder / name, meter
        )
        for spec in unit.specs
    }
    if SourceIdentity.of(unit.path) != unit.identity or identities_of(readers) != sources:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise FormatError(f"{unit.path} has changed while it was staged: stage it again")
    write_record(unit, folder, files, sources, is_copy=copied is not None)


def _copied(
    dataset: Dataset, unit: Unit, readers: Sequence[ArrayReader], folder: Path, meter: Meter
) -> dict[str, Written] | None:
    """Copies the file as it is, where that has all that is needed and little else."""
    if not unit.is_worth_a_copy or not _has_its_data(unit, readers):
        return None
    target = folder / copy_name(unit)
    written = copy_file(unit.path, target, meter)
    if not _can_be_opened(dataset, target):  # it has links to files beside it
        target.unlink(missing_ok=True)
        return None
    return {target.name: written}


def _can_be_opened(dataset: Dataset, path: Path) -> bool:
    """Tried again, as another process may have put its own copy there meanwhile."""
    for _ in range(5):
        try:
            dataset.open_file(path)
        except FormatError:
            continue
        return True
    return False


def _has_its_data(unit: Unit, readers: Sequence[ArrayReader]) -> bool:
    """Whether the data lies plainly in the file; one smaller than its arrays has them elsewhere."""
    if not unit.path.is_file() or any(reader.sources for reader in readers):
        return False
    found = [reader.storage() for reader in readers]
    is_plain = all(each.kind in ("contiguous", "chunked") and each.is_seekable for each in found)
    return is_plain and sum(each.nbytes for each in found) <= unit.identity.nbytes
