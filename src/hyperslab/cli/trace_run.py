"""``hyperslab trace run``: what any program reads."""

from __future__ import annotations

import signal
from pathlib import Path

import click

EXAMPLES = """\b
Examples:
  hyperslab trace run -- python train.py --epochs 2
  hyperslab trace run -o traces/a -- torchrun --nproc-per-node 4 train.py
  srun hyperslab trace run -o traces/b -- python train.py
  hyperslab trace report trace
"""


@click.command(
    epilog=EXAMPLES,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="trace",
    show_default=True,
    metavar="FOLDER",
    help="Where trace files go: one for each process that reads.",
)
@click.option(
    "--all", "keep_all", is_flag=True, help="Record all files: programs and libraries too."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, output: Path, keep_all: bool, command: tuple[str, ...]) -> None:
    """Record the opens, reads and closes of COMMAND, which may be any program.

    Its child processes are recorded too. Its exit code is passed on, and signals are handed on to
    it. On Linux, for programs that load shared libraries; the recorder is compiled once, which
    takes a C compiler.
    """
    from hyperslab.trace.foreign.run_program import NotStartedError, run_program

    try:
        ran = run_program(command, output, keep_all=keep_all)
    except NotStartedError as error:
        click.echo(f"Error: {error}", err=True)
        ctx.exit(error.exit_code)
    except KeyboardInterrupt:  # before the program was started: from then on it is its own
        ctx.exit(128 + signal.SIGINT)
    if not ran.was_seen:
        told = (
            f"nothing was recorded: {command[0]} did not load the recorder; it is linked "
            "statically, runs as another user, or drops LD_PRELOAD"
        )
    elif not ran.num_files:
        told = "nothing was recorded: no data file was read (--all records all files)"
    else:
        told = f"{ran.num_files} processes were recorded; see: hyperslab trace report {output}"
    click.echo(f"hyperslab trace run: {told}", err=True)
    ctx.exit(ran.exit_code)
