"""The command group: finds subcommands, and prints errors raised on purpose as one line."""

from typing import Any

import click

from hyperslab import __version__
from hyperslab.cli.lazy import LazyGroup
from hyperslab.errors import HyperslabError

COMMANDS = {
    "doctor": "hyperslab.cli.doctor",
    "data": "hyperslab.cli.data",
    "train": "hyperslab.cli.train",
    "export": "hyperslab.cli.export",
}
"""Each command's name, and the module that holds it under that name."""

EXAMPLES = """\b
Examples:
  hyperslab doctor                        is this machine ready?
  hyperslab doctor --json > machine.json  the same for a program or a bug report
  hyperslab data info cosmo/*.h5          what is in these files?
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
