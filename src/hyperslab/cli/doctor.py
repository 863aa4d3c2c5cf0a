"""``hyperslab doctor``: what is here, and whether two ranks can compute together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperslab.cli.checkup import Report, begin_report, finish_report
from hyperslab.cli.machine import Machine
from hyperslab.errors import HyperslabError

if TYPE_CHECKING:  # it loads torch
    from hyperslab.comm.launch import Launch

EXAMPLES = """\b
Examples:
  hyperslab doctor
  hyperslab doctor --json | jq .machine
  srun --ntasks=1 --gpus=1 hyperslab doctor
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def doctor(as_json: bool) -> None:
    """Check that this machine is ready.

    Shows versions, devices and the launcher, and runs a self-test: two local processes convolve a
    small tensor together and compare with one process, on CPUs, and on GPUs where there are any.
    They tell how their messages travel and what an exchange of 64 KiB and of 1 MiB costs. Under
    torchrun, srun or mpirun only rank 0 looks around.
    """
    report = begin_report()
    if report.launch and report.launch.rank > 0:
        return
    if report.has_torch:
        with Console(stderr=True).status("Two ranks compute together ..."):
            finish_report(report)
    if as_json:
        click.echo(report.to_json())
    else:
        Console().print(_to_table(report))
    if failures := report.failures:
        first = failures[0]
        raise HyperslabError(
            f"{len(failures)} of {len(report.checks)} checks failed: {first.name}: {first.detail}"
        )


def _to_table(report: Report) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, version in report.versions.items():
        table.add_row(name, version or "-")
    table.add_row()
    for name, text in _describe_place(report):
        table.add_row(name, Text(text))
    for note in report.notes:
        table.add_row("note", Text(note, style="yellow"))
    table.add_row()
    for check in report.checks:
        word = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        table.add_row(check.name, Text.assemble(word, f"  {check.detail}"))
    return table


def _describe_place(report: Report) -> list[tuple[str, str]]:
    rows = _describe_machine(report.machine) if report.machine else []
    if report.backends:
        here = [name for name, is_here in report.backends.items() if is_here]
        rows.append(("backends", ", ".join(here) or "-"))
    if report.launch:
        rows.append(("launcher", _describe_launch(report.launch)))
    return rows


def _describe_machine(machine: Machine) -> list[tuple[str, str]]:
    gpus = [
        (f"GPU {index}", f"{gpu['name']}, {gpu['memory_nbytes'] / 2**30:.1f} GiB")
        for index, gpu in enumerate(machine["gpus"])
    ]
    return [
        ("CPU cores", f"{machine['cpu_cores']:g} usable"),
        ("memory", f"{machine['memory_nbytes'] / 2**30:.1f} GiB usable"),
        *gpus,
    ]


def _describe_launch(launch: Launch) -> str:
    if launch.launcher == "alone":
        return "none found, alone"
    return (
        f"{launch.launcher}: rank {launch.rank} of {launch.num_ranks}, {launch.num_local_ranks} on "
        f"this node, rank 0 at {launch.master_addr}:{launch.master_port}"
    )
