"""``hyperslab data stage``: copy samples, or boxes of them, to a disk of this node's own."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperslab.cli.data_options import JSON, Source, data_options, mesh_option, numbers_option
from hyperslab.cli.progress import progress_bar
from hyperslab.errors import ConfigError
from hyperslab.io.dataset import rank_boxes
from hyperslab.io.partial import shown_nbytes
from hyperslab.io.spec import check_cuts
from hyperslab.io.stage import StageReport, stage as stage_data
from hyperslab.io.stage.run import THREADS
from hyperslab.layout import Grid

EXAMPLES = """\b
Examples:
  hyperslab data stage 'packed/*.h5' /local/cosmo --preset cosmoflow
  hyperslab data stage 'packed/*.h5' /local/cosmo --preset cosmoflow \\
      --mesh depth=4,height=2 --ranks 0-3        what ranks 0 to 3 of 8 read
  hyperslab data stage 'packed/*.h5' /local/cosmo --preset cosmoflow --samples 0-499
"""


@click.command(epilog=EXAMPLES)
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
    with progress_bar("Staging") as progress:
        report = stage_data(
            dataset,
            directory,
            boxes=boxes,
            samples=samples,
            threads=threads,
            verify=verify,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(_to_table(report))


def _check_ranks(ranks: range | tuple[int, ...], mesh: Grid) -> None:
    if max(ranks) >= mesh.num_ranks:
        raise ConfigError(
            f"there is no rank {max(ranks)}: the mesh {mesh.describe()} has ranks 0 to "
            f"{mesh.num_ranks - 1}"
        )


def _to_table(report: StageReport) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    kept = f", {report.num_kept} were there already" if report.num_kept else ""
    table.add_row("files", Text(f"{report.num_staged} staged in {report.directory}{kept}"))
    table.add_row("bytes", f"{shown_nbytes(report.nbytes)}, compared after writing")
    table.add_row("time", f"{report.seconds:.1f} s, {shown_nbytes(report.bandwidth)}/s")
    return table
