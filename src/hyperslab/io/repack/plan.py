"""What is written for each array: under which name, in which order, in which chunks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.reader import suffix_of
from hyperslab.io.spec import ArraySpec, check_cuts, sample_layout, shown_shape
from hyperslab.layout import Cuts, Grid, Span, cut_evenly

COMPRESSIONS = ("bitshuffle-lz4", "zstd", "gzip", "none")
CHUNK_NBYTES = 1 << 20
"""Large enough that a disk reads it at speed, small enough that threads share the work."""
SMALL_NBYTES = 1 << 14
"""Samples below this share a chunk: one by one they would cost more by their number."""
SMALL_BOX_NBYTES = 1 << 16
"""A box that no mesh will cut further."""
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""Into how many chunks a piece may be cut along a dim, where no number divides it well."""


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
        num_samples = max(1, SMALL_NBYTES // max(1, spec.nbytes))
        found = found and (num_samples, *found)
    return ArrayPlan(spec.name, axes, order, found, sample_words(spec))


def _given(chunks: Sequence[int], shape: Sequence[int], spec: ArraySpec) -> tuple[int, ...]:
    if len(chunks) != len(shape):
        raise ConfigError(
            f"chunks {shown_shape(chunks)} have {len(chunks)} dims, but samples of "
            f"{spec.name!r} are written with {len(shape)}: {shown_shape(shape)}"
        )
    return tuple(max(1, min(pair)) for pair in zip(chunks, shape, strict=True))


def _chosen(
    spec: ArraySpec, axes: str, shape: Sequence[int], grid: Grid | None
) -> tuple[int, ...] | None:
    if not spec.nbytes or not shape or (not spec.is_cut and spec.nbytes <= CHUNK_NBYTES):
        return None
    if not axes:
        return slab_chunks(shape, spec.dtype.itemsize)
    cuts = _cuts(spec, grid)
    dims = [ChunkDim(cuts[letter], letter != "C") for letter in axes]
    return choose_chunks(dims, spec.dtype.itemsize, is_cubic=grid is None)


def _cuts(spec: ArraySpec, grid: Grid | None) -> dict[str, Cuts]:
    """Where each dim is cut, by its letter."""
    extents = dict(zip(spec.axes.names, spec.shape, strict=True))
    if grid is None:
        # Into how many pieces along each dim any mesh may be thought to cut a sample.
        ndim = len(spec.axes.names.replace("C", ""))
        num = next((n for n in (8, 4, 2) if spec.nbytes >= SMALL_BOX_NBYTES * n**ndim), 1)
        return {
            letter: cut_evenly(extent, 1 if letter == "C" else min(num, extent))
            for letter, extent in extents.items()
        }
    splits = sample_layout(spec, grid).splits
    return {
        letter: split.cuts if split else Cuts((0, extent))
        for (letter, extent), split in zip(extents.items(), splits, strict=True)
    }


def plan_targets(paths: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Where each file is written: below ``out``, in folders like those of the sources."""
    sources = list(dict.fromkeys(paths))
    parents = [path.resolve().parent for path in sources]
    common = os.path.commonpath(parents)
    names = [
        parent.relative_to(common) / path.name
        for parent, path in zip(parents, sources, strict=True)
    ]
    stems = [name.name[: len(name.name) - len(suffix_of(name))] or name.name for name in names]
    short = [name.with_name(f"{stem}.h5") for name, stem in zip(names, stems, strict=True)]
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


@dataclass(frozen=True)
class ChunkDim:
    """One dim of an array, in the order in which it is written."""

    cuts: Cuts
    """Where ranks' boxes end."""
    is_spatial: bool

    def lengths(self) -> list[int]:
        """What a chunk may measure along it.

        Where all pieces are equal, only what divides them; else no length fits all cuts, but 1, and
        the best is found by trying.
        """
        found = _divisors(math.gcd(*self.cuts.bounds))
        sizes = {span.size for span in self.cuts.spans}
        if len(sizes) > 1 or self.cuts.num == 1:
            found |= {-(-max(sizes) // count) for count in COUNTS if count <= max(sizes)}
        return _thinned(sorted(found, reverse=True))

    def amplification(self, length: int) -> float:
        """What the rank that is worst off decodes along it, as a multiple of what it wants."""
        spans = [span for span in self.cuts.spans if span.size]
        return max(_num_touched(span, length) * length / span.size for span in spans)


def choose_chunks(dims: Sequence[ChunkDim], itemsize: int, *, is_cubic: bool) -> tuple[int, ...]:
    """The best chunk for ranks that read the boxes between the cuts of ``dims``.

    Ranks read all channels of their box, so these may be in one chunk or in several. Of chunks that
    serve equally well, ``is_cubic`` takes the one with the most equal sides, which serves all
    meshes alike; else it is the one with the longest runs in memory, which is a slab.

    >>> from hyperslab.layout import cut_evenly
    >>> cut, whole = cut_evenly(512, 4), cut_evenly(512, 1)
    >>> dims = [ChunkDim(cut_evenly(4, 1), False), ChunkDim(cut, True)]
    >>> dims += [ChunkDim(whole, True)] * 2
    >>> choose_chunks(dims, 2, is_cubic=False)
    (1, 2, 512, 512)
    """
    fits = [{length: dim.amplification(length) for length in dim.lengths()} for dim in dims]

    def cost(lengths: tuple[int, ...]) -> tuple[float, ...]:
        excess = math.prod(fit[length] for fit, length in zip(fits, lengths, strict=True))
        size = math.log2(math.prod(lengths) * itemsize / CHUNK_NBYTES)
        # 6% too much, and sizes within a factor of 1.5, are as good as none.
        score = 4 * math.log2(max(1.06, excess)) + max(0.0, size - 0.6, -size / 2 - 0.3)
        sides = [length for length, dim in zip(lengths, dims, strict=True) if dim.is_spatial]
        shape = max(sides) / min(sides) if is_cubic and sides else 1.0
        return (round(score, 3), excess, shape, *(-length for length in reversed(lengths)))

    return min(product(*fits), key=cost)


def slab_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Chunks for an array that is read whole: runs of about a MiB."""
    chunks = list(shape)
    for dim, extent in enumerate(shape):
        row = math.prod(chunks[dim + 1 :]) * itemsize
        chunks[dim] = max(1, min(extent, CHUNK_NBYTES // row))
    return tuple(chunks)


def _num_touched(span: Span, length: int) -> int:
    return -(-span.stop // length) - span.start // length


def _divisors(number: int) -> set[int]:
    small = {i for i in range(1, math.isqrt(number) + 1) if number % i == 0}
    return small | {number // i for i in small}


def _thinned(lengths: Sequence[int]) -> list[int]:
    """``lengths``, which fall, without those that are nearly the same as another."""
    kept: list[int] = []
    for length in lengths:
        if not kept or length * 1.15 < kept[-1] or length == 1:
            kept.append(length)
    return kept
