"""Are the bars that were met still met?

    python benchmarks/bars.py                       # or: make bench
    python benchmarks/bars.py --only read store

Runs the quick form of each benchmark that has bars, one after another on a machine that is quiet,
and prints every bar with what was measured. Where a machine may be too slow for a bar, the same run
measures the least program that does the same work: its result is the limit. A bar that is missed
and lies beyond its limit is shown as "MISSED, limit ...": there it is out of reach on this machine.

A script of which a bar is missed runs once more: the better of two counts, of limits too, as other
work on the machine only ever makes things slower. Exits with 1 if a bar is missed.
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
SCRIPTS = ("overhead", "halo_conv", "read", "parallel_read", "loader", "store", "trace")
SCRIPTS += ("trace_report",)
GPU_SCRIPTS = ("gpu_step",)
TABLE_WIDTH = 124


class Bar(NamedTuple):
    script: str
    what: str
    measured: float
    sign: str
    """``<=`` or ``>=``: how ``measured`` must compare with ``bar``."""
    bar: float
    limit: float | None = None
    """What the least program reaches that does the same work, where there is one."""

    @property
    def is_met(self):
        return self._holds(self.measured)

    @property
    def is_beyond_limit(self):
        return self.limit is not None and not self._holds(self.limit)

    @property
    def verdict(self):
        if self.is_met:
            return "met"
        return f"MISSED, limit {self.limit:.3g}" if self.is_beyond_limit else "MISSED"

    def better(self, other):
        choose = min if self.sign == "<=" else max
        limits = [each.limit for each in (self, other) if each.limit is not None]
        return self._replace(
            measured=choose(self.measured, other.measured),
            limit=choose(limits) if limits else None,
        )

    def _holds(self, value):
        return value <= self.bar if self.sign == "<=" else value >= self.bar


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
    for name in ("benchmark", "what", "measured", "bar", "limit", ""):
        table.add_column(name, justify="left" if name in ("benchmark", "what", "") else "right")
    for bar in bars:
        limit = "" if bar.limit is None else f"{bar.limit:.3g}"
        verdict = bar.verdict if bar.is_met else f"[red]{bar.verdict}[/red]"
        cells = bar.script, bar.what, f"{bar.measured:.3g}", f"{bar.sign} {bar.bar:g}", limit
        table.add_row(*cells, verdict)
    return table


def as_json(bars):
    rows = [
        bar._asdict()
        | {"met": bar.is_met, "beyond_limit": bar.is_beyond_limit, "verdict": bar.verdict}
        for bar in bars
    ]
    return json.dumps(rows, indent=1)


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="A benchmark by name; may be given several times.")
@click.option("--json", "to_json", is_flag=True, help="Print JSON rather than a table.")
def main(only, to_json):
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
    if to_json:
        print(as_json(bars))
    else:
        Console(width=TABLE_WIDTH).print(table_of(bars))
    raise SystemExit(0 if all(bar.is_met for bar in bars) else 1)


if __name__ == "__main__":
    main()
