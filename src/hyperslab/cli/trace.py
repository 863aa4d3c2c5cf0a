"""``hyperslab trace``: record what a program does, and look at it."""

import click

from hyperslab.cli.main import LazyGroup

COMMANDS = {
    "report": "hyperslab.cli.trace_report",
    "compare": "hyperslab.cli.trace_report",
    "run": "hyperslab.cli.trace_run",
    "export": "hyperslab.cli.trace_files",
    "import": "hyperslab.cli.trace_files",
}

EXAMPLES = """\b
Examples:
  hyperslab trace report runs/cosmo                 what did it wait for?
  hyperslab trace report runs/cosmo --html trace.html
  hyperslab trace compare runs/before runs/after    what became faster?
  hyperslab trace run -- python train.py            what does any program read?
  hyperslab trace export runs/cosmo -o trace.json   for ui.perfetto.dev; .csv, .parquet
  hyperslab trace import profile.json -o traces     what another tool recorded
"""


@click.group(cls=LazyGroup, modules=COMMANDS, epilog=EXAMPLES)
def trace() -> None:
    """See what waits for what: reads, copies, passes, messages, of every rank."""
