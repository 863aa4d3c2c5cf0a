"""Every file looked at and every value read: what is odd in a data set."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.copying import Meter, Progress
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.threads import for_each
from hyperslab.io.engine.tiles import grain_of, tiles
from hyperslab.io.manifest import Manifest
from hyperslab.io.reader import ArrayReader
from hyperslab.io.spec import ArraySpec, shown_shape
from hyperslab.layout import Box

PIECE_NUMEL = 1 << 22


@dataclass(frozen=True, kw_only=True, order=True)
class Suspicion:
    """What is odd about an array of a file, or of a sample in it."""

    file: str
    array: str
    row: int
    """Of the sample in the file."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A sample, and what lies beside it, in words."""

    key: str
    beside: tuple[tuple[str, str], ...]
    """Where each array lies that is not in the sample's own file."""


def list_pairs(manifest: Manifest, num: int) -> tuple[Pair, ...]:
    """The first few samples, with the places of what lies beside them."""
    if len(manifest.sources) == 1:
        return ()
    return tuple(_pair(manifest, index) for index in range(min(num, len(manifest))))


def _pair(manifest: Manifest, index: int) -> Pair:
    places = []
    for name, (source, _) in manifest.columns.items():
        if source:
            where = manifest.where(index, name)
            row = "" if where.row is None else f", row {where.row}"
            places.append((name, f"{where.file.name}{row}"))
    return Pair(key=manifest.key(index), beside=tuple(places))


def count_shapes(manifest: Manifest) -> dict[str, int]:
    """The shapes of the samples, as far as their files were looked at, and how many have each."""
    source = manifest.sources[0]
    spec, found = source.whole[0], Counter[str]()
    for file, number in Counter(manifest.places[:, 0, 0].tolist()).items():
        if looks := source.files[file].looks:
            found[shown_shape(_sample_shape(spec, looks[0].shape))] += number
    return dict(found.most_common())


def _sample_shape(spec: ArraySpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    fits = len(shape) == spec.axes.ndim + spec.axes.stacked
    return spec.axes.sample_shape(shape) if fits else shape


def find_suspicions(dataset: Dataset, progress: Progress | None = None) -> list[Suspicion]:
    """Arrays with NaN, with one value everywhere, of another shape or dtype, or not readable."""
    manifest = dataset.manifest
    places = {
        (name, *manifest.place(index, source))
        for name, (source, _) in manifest.columns.items()
        for index in range(len(manifest))
    }
    meter = Meter(len(places), progress)
    found: list[Suspicion] = []
    lock = threading.Lock()

    def look(place: tuple[str, int, int]) -> None:
        name, file, row = place
        number, position = manifest.columns[name]
        source = manifest.sources[number]
        path = source.files[file].path
        try:
            why = _why(source.open(path)[position], source.arrays[position], row)
        except FormatError as error:
            why = str(error)
        meter.add(1)
        if why:
            with lock:
                found.append(Suspicion(file=str(path), array=name, row=row, why=why))

    for_each(look, sorted(places))
    return sorted(found)


def _why(reader: ArrayReader, spec: ArraySpec, row: int) -> str:
    """What is odd about a sample, or nothing."""
    shape = _sample_shape(spec, reader.shape)
    if reader.dtype != spec.dtype:
        return f"has {reader.dtype}, others {spec.dtype}"
    if shape != spec.shape:
        return f"has shape {shown_shape(shape)}, others {shown_shape(spec.shape)}"
    if spec.axes.stacked and row >= reader.shape[0]:
        return f"has {reader.shape[0]} samples"
    whole = spec.axes.file_box(row, Box.whole(spec.shape))
    num_odd, low, high = 0, np.inf, -np.inf
    for box in tiles(whole, grain_of(reader), PIECE_NUMEL):
        values: NDArray[Any] = np.empty(box.shape, reader.dtype)
        reader.read(box, values)
        if values.dtype.kind in "fc":
            values = np.abs(values) if values.dtype.kind == "c" else values
            finite = values[np.isfinite(values)]
            num_odd += values.size - finite.size
            values = finite
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if num_odd:
        return f"has {num_odd} of {whole.numel} values that are NaN or infinite"
    return f"is {low:g} everywhere" if whole.numel > 1 and low == high else ""
