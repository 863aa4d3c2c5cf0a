"""``hyperslab data index`` and ``stats``: a manifest in one file, and what all values are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hyperslab.cli.data_options import JSON, Source, data_options_and_out
from hyperslab.cli.local_ranks import find_launcher
from hyperslab.cli.output import bars, counted, print_result, progress_bar, two_columns
from hyperslab.cli.rank_errors import begin_rank, told_once
from hyperslab.io.dataset import Dataset
from hyperslab.io.measures import ChannelStatistics, Statistics
from hyperslab.io.opening import index_of, looked_at
from hyperslab.io.sharing import Ranks
from hyperslab.io.spec import shown_shape
from hyperslab.io.statistics import NONZERO, with_statistics

SHOWN_PERCENTILES = ("1", "50", "99")
GROUP = 4
"""Bins that are shown as one."""

INDEX_EXAMPLES = """\b
Examples:
  hyperslab data index cosmo -o cosmo.json --preset cosmoflow
  hyperslab data index imagesTr -o train.json --beside 'label=labelsTr/*.nii.gz'
  hyperslab data index cubes -o cubes.json --sample density --axes DHW \\
      --beside y=parameters.csv --column omega_m --column sigma_8
"""


@click.command(epilog=INDEX_EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@data_options_and_out("The index to write, such as data.json.", required=True)
@JSON
def index(source: Source, out: Path, as_json: bool) -> None:
    """Write one file that says which samples there are at PATH, and where all they have lies.

    PATH is a folder, a pattern or files. What belongs to a sample is found once: its label map, its
    row in a table, its file's size and time, shape and affine. Wherever files can be named, the
    index opens at once, and names a file that has changed, is missing, or has come since.
    """
    with progress_bar("Looking at files") as progress:
        dataset = Dataset(looked_at(source.open().manifest, progress))
    dataset.save(out)
    print_result({**_summary(dataset), "index": str(out)}, as_json, _index_table(dataset, out))


def _summary(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    shapes = {str(file.looks[0].shape) for file in manifest.files if file.looks}
    return {
        "num_samples": len(dataset),
        "num_files": len({file.path for file in manifest.all_files()}),
        "arrays": {name: [str(s.dtype), list(s.shape)] for name, s in dataset.arrays.items()},
        "num_shapes": len(shapes),
        "num_unread": sum(not file.looks for file in manifest.files),
    }


def _index_table(dataset: Dataset, out: Path) -> Table:
    found = _summary(dataset)
    table = two_columns()
    table.add_row("index", Text(str(out)))
    table.add_row("samples", f"{found['num_samples']}, in {counted(found['num_files'], 'file')}")
    for name, spec in dataset.arrays.items():
        table.add_row(Text(name), f"{spec.dtype} {shown_shape(spec.shape)}")
    if found["num_shapes"] > 1:
        words = f"{found['num_shapes']} different shapes: see 'hyperslab data info {out}'"
        table.add_row("warning", Text(words, style="yellow"))
    if found["num_unread"]:
        words = f"{counted(found['num_unread'], 'file')} cannot be opened: see 'data info --check'"
        table.add_row("warning", Text(words, style="yellow"))
    return table


STATS_EXAMPLES = """\b
Examples:
  hyperslab data stats cosmo.json                    measures, and keeps it in the index
  hyperslab data stats cosmo --preset cosmoflow -o cosmo.json
  hyperslab data stats train.json --foreground label
  torchrun --nproc-per-node 8 -m hyperslab data stats cosmo.json
"""


@click.command(epilog=STATS_EXAMPLES)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@data_options_and_out("The index to keep it in; default: PATH, if that is one.")
@click.option(
    "--foreground",
    metavar="WHAT",
    help=f"Count alone what is not 0 ({NONZERO}), or lies where this label map is above 0.",
)
@JSON
@click.pass_context
def stats(
    ctx: click.Context, source: Source, foreground: str | None, out: Path | None, as_json: bool
) -> None:
    """Measure all values of all samples at PATH: mean, deviation, percentiles, histogram.

    Each channel by itself, exactly, and the same on any number of ranks: start it under torchrun or
    srun to share the work. What is found is kept in the index, from where normalize = "standard"
    takes it.
    """
    out = out or index_of(source.paths)
    begin_rank()
    launch = find_launcher()
    if launch is None:
        found = _measure(source, foreground, out, None)
    else:
        with_traceback = bool(ctx.parent and ctx.find_root().params.get("traceback"))
        with told_once(launch, with_traceback=with_traceback):
            found = _measure(source, foreground, out, _mesh())
    if launch is None or launch.rank == 0:
        print_result(found.to_dict(), as_json, *_report(found, out))


def _measure(
    source: Source, foreground: str | None, out: Path | None, mesh: Ranks | None
) -> Statistics:
    """Measures, and has rank 0 write the index."""
    dataset = source.open(mesh)
    with progress_bar("Measuring", in_bytes=True) as progress:
        told = progress if mesh is None or mesh.rank == 0 else None
        dataset = with_statistics(dataset, mesh, foreground=foreground, progress=told)
    if out is not None:
        path = out
        if mesh is None:
            dataset.save(path)
        else:
            mesh.ask_first(lambda: dataset.save(path))
    found = dataset.manifest.statistics
    assert found is not None
    return found


def _mesh() -> Ranks:
    from hyperslab.comm.join import init

    return init(device="cpu")


def _report(found: Statistics, out: Path | None) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    percentiles = [each for each in SHOWN_PERCENTILES if each in found.channels[0].percentiles]
    names = ("channel", "values", "min", *(f"{each}%" for each in percentiles), "max", "mean")
    for name in (*names, "std", "not finite", "histogram"):
        table.add_column(name, justify="left" if name in ("channel", "histogram") else "right")
    for number, channel in enumerate(found.channels):
        table.add_row(str(number), *_row(channel, percentiles))
    what = f", foreground by {found.foreground}" if found.foreground else ""
    title = f"All values of {found.array} in {counted(found.num_samples, 'sample')}{what}"
    kept = f"\nKept in {out}: normalize = 'standard' takes it from there" if out else ""
    return [Text(title, style="bold"), table, *([Text(kept)] if kept else [])]


def _row(channel: ChannelStatistics, percentiles: list[str]) -> list[str]:
    middle = [channel.percentiles.get(each) for each in percentiles]
    numbers = (channel.minimum, *middle, channel.maximum, channel.mean, channel.std)
    shown = ["-" if value is None else f"{value:.5g}" for value in numbers]
    counts = channel.histogram
    drawn = bars([sum(counts[start : start + GROUP]) for start in range(0, len(counts), GROUP)])
    return [str(channel.count), *shown, str(channel.not_finite), f"|{drawn}|"]
