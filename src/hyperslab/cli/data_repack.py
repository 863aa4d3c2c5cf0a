"""``hyperslab data repack``: rewrite samples to HDF5 files whose chunks fit the ranks' boxes."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperslab.cli.data_options import JSON, Source, data_options, mesh_option, shape_option
from hyperslab.cli.machine import find_machine
from hyperslab.cli.progress import progress_bar
from hyperslab.io.partial import shown_nbytes
from hyperslab.io.repack.plan import COMPRESSIONS
from hyperslab.io.repack.run import RepackReport, repack as repack_data
from hyperslab.layout import Grid

EXAMPLES = """\b
Examples:
  hyperslab data repack 'cosmo/*.h5' packed --preset cosmoflow --mesh depth=4,height=2
  hyperslab data repack scan.nii.gz packed
  hyperslab data repack 'fields/*.h5' packed --sample data --axes CDHW --chunks 1x64x128x128
"""


@click.command(epilog=EXAMPLES)
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
    with progress_bar("Repacking") as progress:
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
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(_to_table(report))


def _to_table(report: RepackReport) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    kept = f", {report.num_kept} were there already" if report.num_kept else ""
    table.add_row("files", f"{report.num_written} written to {report.directory}{kept}")
    for array in report.arrays:
        chunks = "x".join(map(str, array.chunks or ()))
        how = f"chunks of {chunks}, {report.compression}" if chunks else "in one piece"
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
