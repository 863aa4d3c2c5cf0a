"""``hyperslab data repack`` and ``stage``: samples rewritten, or copied to this node's own disk."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from hyperslab.cli.data_options import (
    JSON,
    Source,
    data_options,
    mesh_option,
    numbers_option,
    shape_option,
)
from hyperslab.cli.machine import find_machine
from hyperslab.cli.output import print_result, progress_bar, two_columns
from hyperslab.errors import ConfigError
from hyperslab.io.dataset import rank_boxes
from hyperslab.io.repack.plan import COMPRESSIONS
from hyperslab.io.repack.run import RepackReport, repack as repack_data
from hyperslab.io.spec import check_cuts, shown_shape
from hyperslab.io.stage import StageReport, stage as stage_data
from hyperslab.io.stage.run import THREADS
from hyperslab.layout import Grid
from hyperslab.partial import shown_nbytes

# Rewriting to HDF5 files whose chunks fit the ranks' boxes

REPACK_EXAMPLES = """\b
Examples:
  hyperslab data repack 'cosmo/*.h5' packed --preset cosmoflow --mesh depth=4,height=2
  hyperslab data repack scan.nii.gz packed
  hyperslab data repack 'fields/*.h5' packed --sample data --axes CDHW --chunks 1x64x128x128
"""


@click.command(epilog=REPACK_EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.argument("out_dir", type=click.Path(file_okay=False, path_type=Path))
@data_options
@mesh_option("The mesh that will read, such as depth=4,height=2.")
@shape_option("--chunks", "The shape of a chunk, as the sample is written.")
@click.option(
    "--compression",
    type=click.Choice(COMPRESSIONS),
    default=COMPRESSIONS[0],
    show_default=True,
    help="How chunks are compressed.",
)
@click.option("--channels-first", is_flag=True, help="Write the dims in the order C, D, H, W.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes, one file each; default: all cores."
)
@JSON
def repack(
    source: Source,
    out_dir: Path,
    mesh: Grid | None,
    chunks: tuple[int, ...] | None,
    compression: str,
    channels_first: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Rewrite the files at PATH to HDF5 files in OUT_DIR whose chunks fit the ranks' boxes.

    Chunks have about 1 MiB, and none has parts of two ranks' boxes where the mesh cuts evenly. The
    sample and its targets are rewritten; what else an HDF5 file holds is copied as it is. The order
    of dims stays, unless --channels-first is given. Every file is read back and compared. Run it
    again after an interruption: finished files are kept.
    """
    dataset = source.open()
    with progress_bar("Repacking", in_bytes=True) as progress:
        report = repack_data(
            dataset,
            out_dir,
            grid=mesh,
            chunks=chunks,
            compression=compression,
            channels_first=channels_first,
            jobs=jobs or max(1, int(find_machine()["cpu_cores"])),
            progress=progress,
        )
    print_result(report.to_dict(), as_json, _repack_table(report))


def _repack_table(report: RepackReport) -> Table:
    table = two_columns()
    kept = f", {report.num_kept} were there already" if report.num_kept else ""
    table.add_row("files", f"{report.num_written} written to {report.directory}{kept}")
    for array in report.arrays:
        how = "in one piece"
        if array.chunks:
            how = f"chunks of {shown_shape(array.chunks)}, {report.compression}"
        dims = f"dims {array.axes}, " if array.axes else ""
        table.add_row(array.name, Text(dims + how))
    if report.num_written:
        sizes = [report.nbytes_in, report.nbytes_out, report.memory_nbytes]
        before, after, memory = map(shown_nbytes, sizes)
        table.add_row("on disk", f"{before} before, {after} now")
        table.add_row("in memory", f"{memory}, {report.ratio:.1f} times as much as on disk now")
        speed = f"{shown_nbytes(report.bandwidth)}/s of arrays, read, written and compared"
        table.add_row("time", f"{report.seconds:.1f} s, {speed}")
    for what in report.left_out:
        table.add_row("left out", Text(what, style="yellow"))
    return table


# Copying to a disk of this node's own

STAGE_EXAMPLES = """\b
Examples:
  hyperslab data stage 'packed/*.h5' /local/cosmo --preset cosmoflow
  hyperslab data stage 'packed/*.h5' /local/cosmo --preset cosmoflow \\
      --mesh depth=4,height=2 --ranks 0-3        what ranks 0 to 3 of 8 read
  hyperslab data stage 'packed/*.h5' /local/cosmo --preset cosmoflow --samples 0-499
"""


@click.command(epilog=STAGE_EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@data_options
@mesh_option("The mesh whose ranks read, such as depth=4,height=2.")
@numbers_option("--ranks", "Those on this node, such as 0-3; default: all.")
@numbers_option("--samples", "Those needed here, such as 0-499; default: all.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=THREADS,
    show_default=True,
    help="Files copied at once.",
)
@click.option("--verify", is_flag=True, help="Compare checksums of files that are there already.")
@JSON
def stage(
    source: Source,
    directory: Path,
    mesh: Grid | None,
    ranks: tuple[int, ...] | None,
    samples: tuple[int, ...] | None,
    threads: int,
    verify: bool,
    as_json: bool,
) -> None:
    """Copy what this node needs of the files at PATH to DIR, a disk of its own.

    With --mesh, and --ranks where several nodes share it, only the box around what these ranks read
    is copied. Copies are compared with what was read, have another name until they are whole, and
    are kept by the next run unless the source has changed.
    """
    dataset = source.open()
    boxes = None
    if mesh:
        check_cuts(dataset.spec, mesh)
        wanted = range(mesh.num_ranks) if ranks is None else ranks
        _check_ranks(wanted, mesh)
        boxes = rank_boxes(dataset, mesh, wanted)
    elif ranks is not None:
        raise click.UsageError("--ranks needs --mesh: it says which box each rank reads")
    with progress_bar("Staging", in_bytes=True) as progress:
        report = stage_data(
            dataset,
            directory,
            boxes=boxes,
            samples=samples,
            threads=threads,
            verify=verify,
            progress=progress,
        )
    print_result(report.to_dict(), as_json, _stage_table(report))


def _check_ranks(ranks: range | tuple[int, ...], mesh: Grid) -> None:
    if max(ranks) >= mesh.num_ranks:
        raise ConfigError(
            f"there is no rank {max(ranks)}: the mesh {mesh.describe()} has ranks 0 to "
            f"{mesh.num_ranks - 1}"
        )


def _stage_table(report: StageReport) -> Table:
    table = two_columns()
    kept = f", {report.num_kept} were there already" if report.num_kept else ""
    table.add_row("files", Text(f"{report.num_staged} staged in {report.directory}{kept}"))
    table.add_row("bytes", f"{shown_nbytes(report.nbytes)}, compared after writing")
    table.add_row("time", f"{report.seconds:.1f} s, {shown_nbytes(report.bandwidth)}/s")
    return table
