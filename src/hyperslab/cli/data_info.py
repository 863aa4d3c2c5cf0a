"""``hyperslab data info``: what is in files of samples, and what reading boxes of them costs."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hyperslab.cli.data_options import JSON, Source, data_options, mesh_option, shape_option
from hyperslab.cli.output import bars, counted, print_result, progress_bar, two_columns
from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.finding import find_files
from hyperslab.io.info import (
    DataInfo,
    MeshReads,
    SliceInfo,
    describe,
    describe_slice,
    draw_slice,
    mesh_reads,
)
from hyperslab.io.info.check import Suspicion, find_suspicions
from hyperslab.io.info.describe import ArrayInfo, Listed, fitting_presets, list_arrays
from hyperslab.io.info.reads import RankReads, find_trouble
from hyperslab.io.opening import looked_at
from hyperslab.io.spec import READINGS, shown_shape
from hyperslab.layout import Grid
from hyperslab.partial import shown_nbytes

MAX_ROWS = 16
MAX_SHAPES = 6
MAX_CHANNELS = 8

EXAMPLES = """\b
Examples:
  hyperslab data info universe.h5                       which arrays are there?
  hyperslab data info 'cosmo/*.h5' --sample full --target unitPar --axes DHWC
  hyperslab data info 'cosmo/*.h5' --preset cosmoflow --png slice.png
  hyperslab data info 'cosmo/*.h5' --preset cosmoflow --mesh depth=2,height=2
  hyperslab data info 'images/*.nii' --beside 'label=labels/*.nii' --check
  hyperslab data info 'cosmo/*.h5' --preset cosmoflow --tile 64 --index 5
  hyperslab data info volume.raw -o dtype=int16 -o shape=4x128x128x128 --axes CDHW
"""


@click.command(epilog=EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@data_options
@mesh_option("Show what each rank reads, such as depth=2,height=2.")
@shape_option("--tile", "Cut samples into tiles of these extents, such as 64 or 64x64x32.")
@click.option("--index", type=click.IntRange(min=0), default=0, help="Which sample to look at.")
@click.option("--check", is_flag=True, help="Read all files, and list those that are odd.")
@click.option(
    "--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw a slice into this file."
)
@JSON
def info(
    source: Source,
    mesh: Grid | None,
    tile: tuple[int, ...] | None,
    index: int,
    check: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Show what is in the files at PATH.

    Shape, dtype and layout on disk of the sample and its targets, what lies beside the first
    samples, the values of one slice, and what a mesh would read on each rank. A file with several
    arrays, and no --sample, is listed. Warns where the files make boxes expensive, and names the
    command that mends it. With --check all files are read, and those told that have NaN, one value
    everywhere, another shape or another dtype than the first.
    """
    try:
        dataset = source.open()
    except ConfigError:
        arrays = _list_if_many(source)
        if arrays is None:
            raise
        print_result(
            {n: each.words for n, each in arrays.items()}, as_json, *_listing(source, arrays)
        )
        return
    if tile:
        dataset = dataset.tiled(tile if len(tile) > 1 else tile[0])
    odd = None
    if check:
        with progress_bar("Looking at files") as progress:
            dataset = Dataset(looked_at(dataset.manifest, progress))
        with progress_bar("Reading") as progress:
            odd = find_suspicions(dataset, progress)
    values = describe_slice(dataset, index)
    reads = mesh_reads(dataset, mesh, index) if mesh else None
    trouble = find_trouble(dataset, reads, index)
    found = Findings(
        info=describe(dataset),
        values=values,
        reads=reads,
        trouble=trouble,
        odd=odd,
        remedy=_repack_command(source, dataset, mesh) if trouble else None,
    )
    if png:
        draw_slice(dataset, png, index)
    print_result(_to_dict(found), as_json, *_report(found, png))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that is told of a dataset."""

    info: DataInfo
    values: SliceInfo
    reads: MeshReads | None
    trouble: list[str]
    odd: list[Suspicion] | None
    """None if not all files were read."""
    remedy: str | None
    """The command that mends the trouble."""


# Files with several arrays


def _list_if_many(source: Source) -> dict[str, Listed] | None:
    """All arrays of the first file, if there are several and the user did not say which."""
    if source.sample or source.preset or source.options:
        return None
    try:
        arrays = list_arrays(find_files(source.paths)[0], source.format)
    except TypeError:  # a format that needs options
        return None
    return arrays if len(arrays) > 1 else None


def _listing(source: Source, arrays: dict[str, Listed]) -> list[RenderableType]:
    table = two_columns()
    for name, each in arrays.items():
        table.add_row(Text(name), Text(each.words))
    command = f"hyperslab data info {source.words()[0]}"
    largest = max(arrays, key=lambda name: math.prod(arrays[name].shape))
    choices = [f"--preset {name}" for name in fitting_presets(arrays)]
    usual = next(iter(READINGS.get(len(arrays[largest].shape), ())), "LETTERS")
    choices = choices or [f"--sample {shlex.quote(largest)} --axes {usual}"]
    hints = [f"  {command} {choice}" for choice in choices]
    return [
        Text(f"{find_files(source.paths)[0]} has {len(arrays)} arrays:\n", style="bold"),
        table,
        Text("\nSay which holds the sample, and what its dims are, such as"),
        *(Text(hint, style="bold") for hint in hints),
    ]


# The report


def _report(found: Findings, png: Path | None) -> list[RenderableType]:
    arrays = found.info.arrays
    parts = [_size_table(found.info), "", _array_table(arrays), "", *_value_table(found.values)]
    if found.info.pairs:
        parts += ["", *_pair_table(found.info)]
    if found.odd is not None:
        parts += ["", *_odd_table(found.odd)]
    if found.reads:
        parts += ["", *_mesh_table(found.reads, any(array.compression for array in arrays))]
    if png:
        parts += [Text(f"\nSlice drawn into {png}")]
    parts += [Text(f"\nwarning: {line}", style="yellow") for line in found.trouble]
    if found.remedy:
        parts += [Text("\nThis mends it:"), Text(f"  {found.remedy}", style="bold")]
    return parts


def _size_table(info: DataInfo) -> Table:
    table = two_columns()
    more = f" and {info.num_files - 1} more" if info.num_files > 1 else ""
    table.add_row("files", Text(f"{info.first_file}{more}"))
    table.add_row("samples", f"{info.num_samples}, in {counted(info.num_files, 'file')}")
    if len(info.shapes) > 1:
        shapes = [f"{num} of {shape}" for shape, num in info.shapes.items()]
        more = f" and {len(shapes) - MAX_SHAPES} other shapes" if len(shapes) > MAX_SHAPES else ""
        table.add_row("shapes", Text(", ".join(shapes[:MAX_SHAPES]) + more, style="yellow"))
    table.add_row("on disk", f"{shown_nbytes(info.disk_nbytes)}, all files with all they hold")
    table.add_row("in memory", f"{shown_nbytes(info.memory_nbytes)}, the arrays below")
    return table


def _array_table(arrays: tuple[ArrayInfo, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("array", "role", "one sample", "dtype", "in the file", "layout", "compression"):
        table.add_column(name, overflow="fold")
    for array in arrays:
        in_file = f"{shown_shape(array.file_shape)}{f' {array.axes}' if array.axes else ''}"
        layout = array.layout
        if array.chunks:
            layout += f" {shown_shape(array.chunks)}"
        ratio = f"{array.compression}, {array.ratio:.1f}x smaller" if array.compression else "none"
        shape = shown_shape(array.shape)
        row = (array.name, array.role, shape, array.dtype, in_file, layout, ratio)
        table.add_row(*map(Text, row))
        if array.note:
            table.add_row("", Text(array.note, style="yellow"))
    return table


def _pair_table(info: DataInfo) -> list[RenderableType]:
    """What lies beside the first samples."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("sample", overflow="fold")
    for name, _ in info.pairs[0].beside:
        table.add_column(Text(name), overflow="fold")
    for pair in info.pairs:
        table.add_row(Text(pair.key), *(Text(place) for _, place in pair.beside))
    if (left := info.num_samples - len(info.pairs)) > 0:
        table.add_row(f"and {left} more")
    return [Text("What lies beside the samples", style="bold"), table]


def _odd_table(odd: list[Suspicion]) -> list[RenderableType]:
    """The first files that are odd."""
    if not odd:
        return [Text("All files were read, and none is odd", style="bold")]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("file", "array", "what is odd"):
        table.add_column(name, overflow="fold")
    for each in odd[:MAX_ROWS]:
        table.add_row(Text(each.file), Text(each.array), Text(each.why, style="yellow"))
    if (left := len(odd) - MAX_ROWS) > 0:
        table.add_row(f"and {left} more")
    title = f"All files were read, and this is odd in {counted(len(odd), 'array')} of them"
    return [Text(title, style="bold"), table]


def _value_table(values: SliceInfo) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("channel", "min", "max", "mean", "std", "zeros", "not finite", "histogram"):
        table.add_column(name, justify="left" if name in ("channel", "histogram") else "right")
    for number, channel in enumerate(values.channels[:MAX_CHANNELS]):
        numbers = (channel.minimum, channel.maximum, channel.mean, channel.std)
        shown = ["-" if value is None else f"{value:.5g}" for value in numbers]
        fractions = (f"{channel.zeros:.1%}", f"{channel.not_finite:.1%}")
        table.add_row(str(number), *shown, *fractions, f"|{bars(channel.histogram)}|")
    if (left := len(values.channels) - MAX_CHANNELS) > 0:
        table.add_row(f"and {left} more")
    kind = "of log(1 + value)" if values.is_log else "from min to max"
    return [Text(f"Values of {values.place}; histograms {kind}", style="bold"), table]


# Meshes


def _mesh_table(reads: MeshReads, is_compressed: bool) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    touches = "decodes" if is_compressed else "reads through"
    for name in ("rank", "box", "wants", "from disk", touches, "reads", "amplification"):
        table.add_column(name, justify="left" if name in ("rank", "box") else "right")
    if len(reads.ranks) <= MAX_ROWS:
        rows = [_rank_row(each) for each in reads.ranks]
    else:
        rows = _summary_rows(reads)
    for row in rows:
        table.add_row(*row)
    title = f"What each of {len(reads.ranks)} ranks reads of a sample on {reads.grid.describe()}"
    return [Text(title, style="bold"), table]


def _rank_row(each: RankReads) -> tuple[str, ...]:
    box = ", ".join(f"{span.start}:{span.stop}" for span in each.box.spans)
    sizes = (each.cost.wanted_nbytes, each.cost.disk_nbytes, each.cost.touched_nbytes)
    return (
        str(each.rank),
        f"[{box}]",
        *map(shown_nbytes, sizes),
        str(each.cost.num_reads),
        f"{each.cost.amplification:.2f}",
    )


def _summary_rows(reads: MeshReads) -> list[tuple[str, ...]]:
    sizes = [
        reads.spread(lambda cost: cost.wanted_nbytes),
        reads.spread(lambda cost: cost.disk_nbytes),
        reads.spread(lambda cost: cost.touched_nbytes),
    ]
    counts = reads.spread(lambda cost: cost.num_reads)
    factors = reads.spread(lambda cost: cost.amplification)
    shapes = dict.fromkeys(shown_shape(each.box.shape) for each in reads.ranks)
    box = " or ".join(list(shapes)[:2]) + (" ..." if len(shapes) > 2 else "")
    return [
        (
            word,
            box,
            *(shown_nbytes(size[i]) for size in sizes),
            f"{counts[i]:.0f}",
            f"{factors[i]:.2f}",
        )
        for i, word in enumerate(("least", "mean", "most"))
    ]


def _repack_command(source: Source, dataset: Dataset, mesh: Grid | None) -> str:
    parent = dataset.paths[0].resolve().parent
    out = shlex.quote(str(parent.with_name(f"{parent.name or 'data'}_repacked")))
    words = source.words()
    if mesh:
        axes = ",".join(f"{axis}={mesh.size(axis)}" for axis in mesh.long_axes)
        words += ["--mesh", axes] if axes else []
    num = len(source.shown_paths)
    return " ".join(["hyperslab data repack", *words[:num], out, *words[num:]])


# For machines


def _to_dict(found: Findings) -> dict[str, Any]:
    ranks = [
        {
            "rank": each.rank,
            "box": [list(span) for span in each.box.spans],
            **asdict(each.cost),
            "amplification": each.cost.amplification,
        }
        for each in (found.reads.ranks if found.reads else ())
    ]
    return {
        **asdict(found.info),
        "arrays": [{**asdict(array), "ratio": array.ratio} for array in found.info.arrays],
        "slice": asdict(found.values),
        "odd": None if found.odd is None else [asdict(each) for each in found.odd],
        "ranks": ranks,
        "warnings": found.trouble,
        "remedy": found.remedy,
    }
