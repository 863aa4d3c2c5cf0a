"""``hyperslab trace export`` and ``import``: files for other tools, and from them."""

from __future__ import annotations

from pathlib import Path

import click

TRACES = click.argument(
    "traces", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)


@click.command()
@TRACES
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Its suffix says what to write: .json, .json.gz, .parquet, .csv or .csv.gz.",
)
def export(traces: tuple[Path, ...], output: Path) -> None:
    """Write TRACES as one file: Chrome/Perfetto JSON, or a table as Parquet or CSV.

    TRACES are run folders, folders of trace files, or files: ours, of PyTorch's profiler, of
    Darshan's parsers, of dftracer, or tables of spans. JSON opens in ui.perfetto.dev.
    """
    from hyperslab.trace.export import export_trace
    from hyperslab.trace.merge import load_trace

    trace = load_trace(traces)
    export_trace(trace, output)
    _tell(trace.notes)
    click.echo(f"{output}: {len(trace)} spans of {len(trace.processes)} processes")


@click.command("import")
@TRACES
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where trace files go: one for each process.",
)
def import_(traces: tuple[Path, ...], output: Path) -> None:
    """Write what other tools recorded as trace files into a new FOLDER.

    TRACES are files of PyTorch's profiler, of Darshan's parsers, of dftracer, or tables of spans;
    ours are taken too.
    """
    from hyperslab.trace.foreign.convert import import_traces

    done = import_traces(traces, output)
    _tell(done.notes)
    click.echo(f"{output}: {done.num_spans} spans of {done.num_files} processes")


def _tell(notes: list[str]) -> None:
    for note in notes:
        click.echo(f"note: {note}", err=True)
