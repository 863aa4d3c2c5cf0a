"""The command group: finds subcommands, and prints errors raised on purpose as one line."""

from importlib import import_module
from typing import Any

import click

from hyperslab import __version__
from hyperslab.errors import HyperslabError

COMMANDS = {"doctor": "hyperslab.cli.doctor"}
"""Each command's name, and the module that holds it under that name."""

EXAMPLES = """\b
Examples:
  hyperslab doctor                        is this machine ready?
  hyperslab doctor --json > machine.json  the same for a program or a bug report
  hyperslab --traceback doctor            where an error came from
"""


class LazyGroup(click.Group):
    """The commands of ``COMMANDS``, each imported when it is asked for.

    The help of the group asks for all of them: their modules import torch inside functions only.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HyperslabError as error:
            if ctx.params["traceback"]:
                raise
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(
    cls=LazyGroup,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from, not one line.")
def main(traceback: bool) -> None:
    """Train CNNs on samples larger than a GPU.

    Results go to stdout, progress to stderr. The exit code is 0 when done, 1 after an error,
    2 for wrong usage.
    """
