"""What is written for each array: under which name, in which order, in which chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.rank_boxes import check_cuts, sample_layout
from hyperslab.io.reader import known_formats
from hyperslab.io.repack.chunks import (
    CHUNK_NBYTES,
    SMALL_NBYTES,
    ChunkDim,
    choose_chunks,
    neutral_num,
    slab_chunks,
)
from hyperslab.io.spec import ArraySpec
from hyperslab.layout import Cuts, Grid, cut_evenly

COMPRESSIONS = ("bitshuffle-lz4", "zstd", "gzip", "none")


@dataclass(frozen=True)
class ArrayPlan:
    """How one array is written."""

    name: str
    axes: str
    """The letters of a sample's dims as they are written; empty for a vector."""
    order: tuple[int, ...]
    """For each dim written, which of the source's dims it is."""
    chunks: tuple[int, ...] | None
    """As written; None in one piece, and then not compressed."""
    sample: str
    """The dtype and shape of one sample, which all files must have."""


def sample_words(spec: ArraySpec) -> str:
    return f"{spec.dtype} {spec.shape}"


def plan_arrays(
    dataset: Dataset,
    grid: Grid | None,
    chunks: Sequence[int] | None = None,
    *,
    channels_first: bool = False,
) -> tuple[ArrayPlan, ...]:
    """How the arrays of ``dataset`` are written for the ranks of ``grid``, or for any mesh."""
    if grid is not None:
        check_cuts(dataset.spec, grid)
    return tuple(
        _plan_array(spec, grid, chunks if spec == dataset.spec else None, channels_first)
        for spec in dataset.arrays.values()
    )


def _plan_array(
    spec: ArraySpec, grid: Grid | None, chunks: Sequence[int] | None, channels_first: bool
) -> ArrayPlan:
    axes = spec.axes.names if channels_first else spec.axes.letters
    order = spec.axes.order if channels_first else tuple(range(spec.axes.ndim))
    shape = [spec.axes.in_file_order(spec.shape)[dim] for dim in order]
    found = _given(chunks, shape, spec) if chunks else _chosen(spec, axes, shape, grid)
    if spec.axes.stacked:
        order = (0, *(dim + 1 for dim in order))
        found = found and (_samples_per_chunk(spec), *found)
    return ArrayPlan(spec.name, axes, order, found, sample_words(spec))


def _given(chunks: Sequence[int], shape: Sequence[int], spec: ArraySpec) -> tuple[int, ...]:
    if len(chunks) != len(shape):
        raise ConfigError(
            f"chunks {'x'.join(map(str, chunks))} have {len(chunks)} dims, but samples of "
            f"{spec.name!r} are written with {len(shape)}: {'x'.join(map(str, shape))}"
        )
    return tuple(max(1, min(pair)) for pair in zip(chunks, shape, strict=True))


def _chosen(
    spec: ArraySpec, axes: str, shape: Sequence[int], grid: Grid | None
) -> tuple[int, ...] | None:
    nbytes = math.prod(shape) * spec.dtype.itemsize
    if not nbytes or not shape or (not spec.is_cut and nbytes <= CHUNK_NBYTES):
        return None
    if not axes:
        return slab_chunks(shape, spec.dtype.itemsize)
    cuts = _cuts(spec, grid)
    pairs = zip(axes, shape, strict=True)
    dims = [ChunkDim(extent, cuts[letter], letter != "C") for letter, extent in pairs]
    return choose_chunks(dims, spec.dtype.itemsize, is_cubic=grid is None)


def _cuts(spec: ArraySpec, grid: Grid | None) -> dict[str, Cuts]:
    """Where each dim is cut, by its letter."""
    extents = dict(zip(spec.axes.names, spec.shape, strict=True))
    if grid is None:
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        num = neutral_num(nbytes, len(spec.axes.names.replace("C", "")))
        return {
            letter: cut_evenly(extent, 1 if letter == "C" else min(num, extent))
            for letter, extent in extents.items()
        }
    splits = sample_layout(spec, grid).splits
    return {
        letter: split.cuts if split else Cuts((0, extent))
        for (letter, extent), split in zip(extents.items(), splits, strict=True)
    }


def _samples_per_chunk(spec: ArraySpec) -> int:
    nbytes = math.prod(spec.shape) * spec.dtype.itemsize
    return max(1, SMALL_NBYTES // max(1, nbytes))


def plan_targets(paths: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Where each file is written: below ``out``, in folders like those of the sources."""
    sources = list(dict.fromkeys(paths))
    parents = [path.resolve().parent for path in sources]
    common = _common(parents)
    names = [
        parent.relative_to(common) / path.name
        for parent, path in zip(parents, sources, strict=True)
    ]
    short = [name.with_name(f"{_stem(name)}.h5") for name in names]
    if len(set(short)) < len(short):  # a.nii and a.nii.gz
        short = [name.with_name(f"{name.name}.h5") for name in names]
    targets = {source: out / name for source, name in zip(sources, short, strict=True)}
    _check_apart(targets)
    return targets


def _check_apart(targets: Mapping[Path, Path]) -> None:
    sources = {path.resolve() for path in targets}
    for source, target in targets.items():
        if target.resolve() in sources:
            raise ConfigError(f"{source} would be written over by {target}: give another folder")
    if len(set(targets.values())) < len(targets):
        raise ConfigError("two of the files would be written under one name: repack them apart")


def _common(folders: Sequence[Path]) -> Path:
    found = folders[0]
    while not all(folder.is_relative_to(found) for folder in folders):
        found = found.parent
    return found


def _stem(path: Path) -> str:
    suffixes = {suffix for suffixes in known_formats().values() for suffix in suffixes}
    fitting = [suffix for suffix in suffixes if path.name.lower().endswith(suffix)]
    stem = path.name[: -len(max(fitting, key=len))] if fitting else path.name
    return stem or path.name


def filter_options(compression: str) -> dict[str, Any]:
    """What h5py's ``create_dataset`` takes for one of ``COMPRESSIONS``."""
    if compression == "none":
        return {}
    if compression == "gzip":
        return {"compression": "gzip", "compression_opts": 4, "shuffle": True}
    try:
        import hdf5plugin
    except ImportError as error:
        raise ConfigError(
            f"compression {compression} needs hdf5plugin: pip install hdf5plugin, or use gzip"
        ) from error
    if compression == "zstd":
        return {"shuffle": True, **hdf5plugin.Zstd()}
    return dict(hdf5plugin.Bitshuffle(cname="lz4"))
