"""``hyperslab trace``: record what a program does, and look at it."""

import click

from hyperslab.cli.main import LazyGroup

COMMANDS = {
    "run": "hyperslab.cli.trace_run",
    "export": "hyperslab.cli.trace_files",
    "import": "hyperslab.cli.trace_files",
}

EXAMPLES = """\b
Examples:
  hyperslab trace run -- python train.py                   what does any program read?
  hyperslab trace export runs/a -o trace.json              for ui.perfetto.dev; .csv, .parquet
  hyperslab trace import profile.pt.trace.json -o traces   what another tool recorded
"""


@click.group(cls=LazyGroup, modules=COMMANDS, epilog=EXAMPLES)
def trace() -> None:
    """See what waits for what: reads, copies, passes, messages, of every rank."""
