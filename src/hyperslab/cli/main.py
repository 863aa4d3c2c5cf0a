"""The command group: finds subcommands, and prints errors raised on purpose as one line."""

from collections.abc import Mapping
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

from hyperslab import __version__
from hyperslab.errors import HyperslabError


class LazyGroup(click.Group):
    """The commands of ``modules``: by name, the module that holds each under its name.

    That of Python's own words, such as ``import``, ends with an underscore there.

    The help of the group asks for all of them: their modules import torch and other heavy packages
    inside functions only.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        attribute = cmd_name + "_" * iskeyword(cmd_name)
        command = getattr(import_module(self._modules[cmd_name]), attribute)
        assert isinstance(command, click.Command)
        return command


COMMANDS = {
    "doctor": "hyperslab.cli.doctor",
    "data": "hyperslab.cli.data",
    "plan": "hyperslab.cli.plan",
    "train": "hyperslab.cli.train",
    "trace": "hyperslab.cli.trace",
    "export": "hyperslab.cli.train",
}
"""Each command's name, and the module that holds it under that name."""

EXAMPLES = """\b
Examples:
  hyperslab doctor                        is this machine ready?
  hyperslab doctor --json > machine.json  the same for a program or a bug report
  hyperslab data info cosmo/*.h5          what is in these files?
  hyperslab plan cosmoflow-512 --gpus 64 --machine dgx-h100
                                          how is it best cut over GPUs, and how fast?
  hyperslab train cosmoflow-64            train on the universes in cosmo/
  hyperslab --traceback doctor            where an error came from
"""


class Main(LazyGroup):
    """Prints errors raised on purpose as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HyperslabError as error:
            if ctx.params["traceback"]:
                raise
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(
    cls=Main,
    modules=COMMANDS,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error came from, not one line.")
def main(traceback: bool) -> None:
    """Train CNNs on samples larger than a GPU.

    Results go to stdout, progress to stderr. The exit code is 0 when done, 1 after an error,
    2 for wrong usage, 75 when a signal stopped training, which can then go on.
    """
