"""``hyperslab export``: the weights of a run as a file for the plain module."""

from __future__ import annotations

from pathlib import Path

import click

EXAMPLES = """\b
Examples:
  hyperslab export runs/cosmoflow-64 weights.safetensors
  hyperslab export runs/cosmoflow-64 early.safetensors --step 100
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Of which checkpoint; default: the last.")
def export(run: Path, file: Path, step: int | None) -> None:
    """Write the weights of the run in folder RUN to FILE, in the safetensors format.

    They are those of the plain module, whatever mesh it was trained on: safetensors.torch.load_file
    and load_state_dict load them without hyperslab.
    """
    from hyperslab.train.export import export_run

    step = export_run(run, file, step)
    click.echo(f"Wrote the weights of step {step} to {file}")
