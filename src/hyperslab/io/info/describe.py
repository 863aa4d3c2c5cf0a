"""What files of samples hold, and how it lies on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hyperslab.errors import FormatError
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.files import nbytes_on_disk
from hyperslab.io.info.check import Pair, count_shapes, list_pairs
from hyperslab.io.presets import PRESETS
from hyperslab.io.reader import ArrayReader, find_format
from hyperslab.io.spec import ArraySpec, shown_shape
from hyperslab.io.tiled import untiled

Shape = tuple[int, ...]
MAX_PAIRS = 4


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One array of a file."""

    name: str
    role: str
    """``sample``, ``cut like the sample``, or ``whole on every rank``."""
    shape: Shape
    """Of one sample, channels first."""
    file_shape: Shape
    axes: str | None
    """The letters of the file's dims; None for a vector."""
    dtype: str
    layout: str
    """``contiguous``, ``chunked``, ..."""
    chunks: Shape | None
    """In the file's order of dims."""
    compression: str | None
    disk_nbytes: int
    """In one file."""
    memory_nbytes: int
    """Of the same, not compressed."""
    note: str | None

    @property
    def ratio(self) -> float:
        """How many times smaller it is on disk."""
        return self.memory_nbytes / self.disk_nbytes if self.disk_nbytes else 1.0


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """A dataset: its size, and the arrays of its first file."""

    first_file: str
    num_files: int
    num_samples: int
    disk_nbytes: int
    """Of all the files."""
    memory_nbytes: int
    """Of all the arrays that were opened, not compressed."""
    arrays: tuple[ArrayInfo, ...]
    pairs: tuple[Pair, ...]
    """The first samples, where something lies beside them."""
    shapes: Mapping[str, int]
    """How many samples have each shape, as far as their files were looked at."""


def describe(dataset: Dataset) -> DataInfo:
    """What is in the files; the first is taken for all where one tells nothing of the others."""
    specs = dataset.arrays.values()
    paths = dict.fromkeys(file.path for file in dataset.manifest.all_files())
    return DataInfo(
        first_file=str(dataset.place_of(0)[0]),
        num_files=len(paths),
        num_samples=len(dataset),
        disk_nbytes=sum(nbytes_on_disk(path) for path in paths),
        memory_nbytes=sum(spec.nbytes for spec in specs) * len(dataset),
        arrays=tuple(_describe_array(dataset, spec) for spec in specs),
        pairs=list_pairs(dataset.manifest, MAX_PAIRS),
        shapes=count_shapes(dataset.manifest),
    )


class Listed(NamedTuple):
    """An array of a file of which nothing more is known."""

    words: str
    """Its dtype and shape, or why it cannot be read."""
    shape: Shape = ()


def list_arrays(path: Path, format: str | None = None) -> dict[str, Listed]:
    """Every array of a file."""
    cls = find_format(path, format)
    found = {}
    for name in cls.names(path):
        try:
            (reader,) = cls.open(path, [name])
            words = f"{reader.dtype} {shown_shape(reader.shape)}"
            found[name] = Listed(words, reader.shape)
        except FormatError as error:
            found[name] = Listed(f"not read: {str(error).removeprefix(f'{path} has ')}")
    return found


def fitting_presets(arrays: Mapping[str, Listed]) -> list[str]:
    """The presets whose arrays are all there, with as many dims, and fewest in that of channels.

    Where one names all arrays of another and more, it is meant.
    """
    found = {name: _names(preset) for name, preset in PRESETS.items() if _fits(preset, arrays)}
    return [name for name in found if not any(found[name] < more for more in found.values())]


def _names(preset: Mapping[str, Any]) -> set[str]:
    target = preset.get("target", ())
    return {preset["sample"], *([target] if isinstance(target, str) else target)}


def _fits(preset: Mapping[str, Any], arrays: Mapping[str, Listed]) -> bool:
    if not _names(preset) <= set(arrays):
        return False
    shape, axes = arrays[preset["sample"]].shape, preset["axes"]
    if len(shape) != len(axes):
        return False
    extents = dict(zip(axes, shape, strict=True))
    return all(extents["C"] <= extents[axis] for axis in extents if axis != "N")


def _describe_array(dataset: Dataset, spec: ArraySpec) -> ArrayInfo:
    reader = untiled(dataset.reader(0, spec.name))
    storage = reader.storage()
    prefix = "N" if len(reader.shape) > spec.axes.ndim else ""
    return ArrayInfo(
        name=spec.name,
        role=_role(dataset, spec),
        shape=spec.shape,
        file_shape=reader.shape,
        axes=prefix + spec.axes.letters if spec.axes.letters else None,
        dtype=str(spec.dtype),
        layout=storage.kind,
        chunks=storage.chunks,
        compression=storage.compression,
        disk_nbytes=storage.nbytes,
        memory_nbytes=nbytes_of(reader),
        note=storage.note,
    )


def _role(dataset: Dataset, spec: ArraySpec) -> str:
    if spec.name == dataset.spec.name:
        return "sample"
    return "cut like the sample" if spec.is_cut else "whole on every rank"


def nbytes_of(reader: ArrayReader) -> int:
    return math.prod(reader.shape) * reader.dtype.itemsize
