"""``hyperslab trace``: record what a program does, and look at it."""

import click

from hyperslab.cli.main import LazyGroup

COMMANDS: dict[str, str] = {}

EXAMPLES = """\b
Examples:
"""


@click.group(cls=LazyGroup, modules=COMMANDS, epilog=EXAMPLES)
def trace() -> None:
    """See what waits for what: reads, copies, passes, messages, of every rank."""
