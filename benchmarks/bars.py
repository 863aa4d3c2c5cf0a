"""Are the bars that were met still met?

    python benchmarks/bars.py                       # or: make bench
    python benchmarks/bars.py --only read store

Runs the quick form of each benchmark that has bars, one after another on a machine that is quiet,
and prints every bar with what was measured. A bar that is missed is measured once more: the better
of two counts, as other work on the machine only ever makes things slower. Exits with 1 if one is
missed.
"""

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SCRIPTS = ("overhead", "halo_conv", "read", "parallel_read", "loader", "store")
GPU_SCRIPTS = ("gpu_step",)


class Bar(NamedTuple):
    script: str
    what: str
    measured: float
    sign: str
    """``<=`` or ``>=``: how ``measured`` must compare with ``bar``."""
    bar: float

    @property
    def is_met(self):
        return self.measured <= self.bar if self.sign == "<=" else self.measured >= self.bar

    def better(self, other):
        choose = min if self.sign == "<=" else max
        return choose(self, other, key=lambda bar: bar.measured)


def measure(script):
    """The bars of one script; raises ``CalledProcessError`` if it fails."""
    path = HERE / f"{script}.py"
    command = [sys.executable, str(path), "--quick", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    bars = runpy.run_path(str(path))["bars"]
    return [Bar(script, *row) for row in bars(json.loads(done.stdout))]


def measure_twice(script):
    first = measure(script)
    if all(bar.is_met for bar in first):
        return first
    return [one.better(other) for one, other in zip(first, measure(script), strict=True)]


def has_gpu():
    import torch

    return torch.cuda.is_available()


def table_of(bars):
    table = Table(title="Bars")
    for name in ("benchmark", "what", "measured", "bar", ""):
        table.add_column(name, justify="right" if name in ("measured", "bar") else "left")
    for bar in bars:
        verdict = "met" if bar.is_met else "[red]MISSED[/red]"
        table.add_row(
            bar.script, bar.what, f"{bar.measured:.3g}", f"{bar.sign} {bar.bar:g}", verdict
        )
    return table


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="A benchmark by name; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def main(only, as_json):
    known = SCRIPTS + (GPU_SCRIPTS if has_gpu() else ())
    if unknown := set(only) - set(known):
        raise click.UsageError(
            f"no bars for {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    console, bars = Console(stderr=True), []
    for script in [name for name in known if not only or name in only]:
        begin = time.perf_counter()
        with console.status(f"{script} ..."):
            bars += measure_twice(script)
        console.print(f"{script}: {time.perf_counter() - begin:.0f} s", highlight=False)
    if as_json:
        print(json.dumps([bar._asdict() | {"met": bar.is_met} for bar in bars], indent=1))
    else:
        Console(width=110).print(table_of(bars))
    raise SystemExit(0 if all(bar.is_met for bar in bars) else 1)


if __name__ == "__main__":
    main()
