"""The sweep as a command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hyperslab.cli.output import progress_bar
from hyperslab.errors import ConfigError
from hyperslab.testing.sweep import Effort, rendered, sweep
from hyperslab.testing.sweep.findings import WRONG

THOROUGH = Effort(samples=10_000, trials=1_000_000, call_seconds=7200)


@click.command()
@click.argument("operators", nargs=-1)
@click.option("--thorough", is_flag=True, help="Every sample on every split, which takes long.")
@click.option("--import", "modules", multiple=True, help="A module that registers rules.")
@click.option("--write", type=click.Path(path_type=Path), help="Where to write the table.")
def main(
    operators: tuple[str, ...], thorough: bool, modules: tuple[str, ...], write: Path | None
) -> None:
    """Try OPERATORS, such as add or nn.functional.conv2d, on Slabs; without any, try all."""
    if write and operators:
        raise click.UsageError("--write writes the table of all operators: name none")
    try:
        with progress_bar("operators") as progress:
            effort = THOROUGH if thorough else Effort()
            findings = sweep(operators or None, effort, modules=modules, on_progress=progress)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    for trial in findings.of(WRONG):
        click.echo(f"wrong: {trial}\n    {trial.why}")
    click.echo(findings.summary())
    if findings.of(WRONG):
        sys.exit(1)
    if write:
        write.write_text(rendered(findings))


if __name__ == "__main__":
    main()
