"""Samples read from where they were staged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.dataset import Dataset, open_checked
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.manifest import Manifest, Source
from hyperslab.io.reader import ArrayReader, Storage
from hyperslab.io.spec import ArraySpec
from hyperslab.io.stage.run import npy_header
from hyperslab.io.stage.unit import Record, Unit, array_name, find_record, plan_units, shape_of
from hyperslab.layout import Box, Span
from hyperslab.trace.recorder import note_local


def open_staged(
    dataset: Dataset,
    directory: str | Path,
    *,
    boxes: Mapping[str, Box] | None = None,
    samples: Sequence[int] | None = None,
    verify: bool = False,
    allow_missing: bool = False,
) -> Dataset:
    """The dataset, read from what ``stage`` put into ``directory`` with the same arguments.

    A sample or a box that was not asked for there is read from the original files. One that was
    asked for and is not there, whole and unchanged, raises ``FormatError`` at once;
    ``allow_missing`` has it read from its original. With ``verify`` all checksums are compared
    first.
    """
    manifest = staged_manifest(
        dataset.manifest,
        Path(directory),
        plan_units(dataset, boxes, samples),
        verify=verify,
        allow_missing=allow_missing,
    )
    return Dataset(manifest)


def staged_manifest(
    manifest: Manifest,
    folder: Path,
    units: Sequence[Unit],
    *,
    verify: bool = False,
    allow_missing: bool = False,
) -> Manifest:
    """The same samples, read from what was staged of ``units``."""
    found = [(unit, find_record(unit, folder, verify=verify)) for unit in units]
    missing = [f"{unit.path}: {why}" for unit, why in found if isinstance(why, str)]
    if missing and not allow_missing:
        raise FormatError(
            f"{len(missing)} of the files are not in {folder}, such as {missing[0]}; stage them "
            "(again) with the same boxes and samples"
        )
    openers = []
    for number, source in enumerate(manifest.sources):
        copies = {
            unit.path: (unit, record.is_copy)
            for unit, record in found
            if unit.source_number == number and isinstance(record, Record)
        }
        openers.append(StagedOpening(source, folder, copies) if copies else None)
    note_local(folder)
    return manifest.stage(openers)


@dataclass(frozen=True, eq=False)
class StagedOpening:
    """Opens what was staged of a file in its place, where there is something."""

    source: Source
    folder: Path
    copies: Mapping[Path, tuple[Unit, bool]]
    """By the original; with whether the whole file was copied as it is."""

    def __call__(self, path: Path) -> list[ArrayReader]:
        if path not in self.copies:
            return self.source.open_original(path)
        unit, is_copy = self.copies[path]
        if is_copy:
            return self.source.open_original(self.folder / unit.name)
        return [StagedArray(self.source, unit, spec, self.folder) for spec in unit.specs]


class StagedArray(ArrayReader):
    """An array of a file, of which one box of some samples is in a file of its own."""

    def __init__(self, source: Source, unit: Unit, spec: ArraySpec, folder: Path) -> None:
        shape = spec.axes.in_file_order(spec.shape)
        self.shape = (unit.num_samples, *shape) if spec.axes.stacked else shape
        self.dtype = spec.dtype
        file, staged = DataFile.look_at(folder / array_name(unit, spec.name)), shape_of(unit, spec)
        offset = len(npy_header(staged, spec.dtype))
        self._local = ContiguousArray(file, offset, staged, spec.dtype)
        self._source, self._path = source, unit.path
        self._number = source.arrays.index(spec)
        self._original: ArrayReader | None = None
        self._box = unit.boxes[spec.name]
        numbers = {number: position for position, number in enumerate(unit.numbers)}
        self._positions = numbers if spec.axes.stacked else None

    def storage(self) -> Storage:
        return self._local.storage()

    def read(self, box: Box, out: NDArray[Any]) -> None:
        places = self._places(box)
        if places is None:
            self._opened_original().read(box, out)
            return
        parts = [out] if len(places) == 1 else [out[i : i + 1] for i in range(len(places))]
        for place, part in zip(places, parts, strict=True):
            self._local.read(place, part)

    def _opened_original(self) -> ArrayReader:
        if self._original is None:
            number = next(i for i, file in enumerate(self._source.files) if file.path == self._path)
            self._original = open_checked(self._source, number)[self._number]
        return self._original

    def _places(self, box: Box) -> list[Box] | None:
        """Where the samples of ``box`` lie in the local file, or None if not all of it is there."""
        one = box if self._positions is None else Box(box.spans[1:])
        if not self._box.contains(one):
            return None
        pairs = zip(one.spans, self._box.spans, strict=True)
        spans = [Span(span.start - a.start, span.stop - a.start) for span, a in pairs]
        if self._positions is None:
            return [Box(tuple(spans))]
        numbers = range(*box.spans[0])
        if not all(number in self._positions for number in numbers):
            return None
        starts = [self._positions[number] for number in numbers]
        return [Box((Span(start, start + 1), *spans)) for start in starts]
