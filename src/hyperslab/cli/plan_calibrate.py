"""``hyperslab plan calibrate``: what kernels and messages take on this machine."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyperslab import __version__
from hyperslab.cli.local_ranks import run_ranks
from hyperslab.cli.machine import find_machine
from hyperslab.cli.output import print_result
from hyperslab.cli.plan import find_network, read_shape
from hyperslab.errors import HyperslabError
from hyperslab.planner.machine import PRECISIONS
from hyperslab.planner.measured import Calibration, cpu_name, load, path_of
from hyperslab.planner.network import Network, to_json
from hyperslab.train.read_config import read_config

EXAMPLES = """\b
Examples:
  hyperslab plan calibrate cosmoflow-128
  hyperslab plan calibrate unet3d --precision fp32 --ranks 1 --ranks 2
  hyperslab plan calibrate nets.py:Net --input 1x256x256x256
"""


@click.command(epilog=EXAMPLES)
@click.argument("name")
@click.option(
    "--input",
    "shape",
    metavar="SHAPE",
    callback=read_shape,
    help="The shape of a sample, channels first, such as 1x256x256x256.",
)
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a setting, such as model.options.size=256. May be repeated.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Of products; default: bf16 on a GPU, else fp32.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    multiple=True,
    help="Ranks that compute at the same time; may be repeated. Default: 1, and as many as there "
    "are GPUs; on CPUs 1, 2 and 4.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def calibrate(
    name: str,
    shape: tuple[int, ...] | None,
    changes: tuple[str, ...],
    precision: str | None,
    ranks: tuple[int, ...],
    as_json: bool,
) -> None:
    """Measure this machine, so that plans of the network NAME rest on times, not on data sheets.

    Convolutions with what follows them, norms and pools are timed on pieces of a sample of several
    sizes, and messages between ranks. Results are kept by device and version, and are added to
    those of other networks; hyperslab plan and hyperslab train --set mesh=auto find them.
    """
    gpus = find_machine()["gpus"]
    precision = precision or ("bf16" if gpus else "fp32")
    config = None if ":" in name else read_config(name, changes)
    network = find_network(name, config, shape, changes)
    numbers = sorted({*ranks} or ({1, len(gpus)} if gpus else {1, 2, 4}))
    path = _measure(network, precision, numbers, gpu=gpus[0]["name"] if gpus else None)
    found = load(path)
    content = {"file": str(path), "device": found.device, "stages": len(found.kernels)}
    print_result(content, as_json, _to_table(found, network, precision), Text(f"Kept in {path}"))


def _measure(network: Network, precision: str, numbers: list[int], gpu: str | None) -> Path:
    import torch

    path = path_of(gpu or cpu_name(), str(torch.__version__), __version__)
    with tempfile.TemporaryDirectory(prefix="hyperslab-calibrate-") as folder:
        listed = Path(folder) / "network.json"
        listed.write_text(to_json(network))
        for num in numbers:
            command: list[Any] = [sys.executable, "-m", "hyperslab.planner.calibrate", listed]
            command += [precision, num, "cuda" if gpu else "cpu", __version__, path]
            words = f"{num} rank{'s' * (num > 1)} measure{'s' * (num == 1)} {network.name} ..."
            with Console(stderr=True).status(words):
                outcome = run_ranks([*map(str, command)], num)
            if failed := [each for each in outcome.endings if each.is_failure]:
                raise HyperslabError(f"calibration on {num} ranks failed: {failed[0]}")
    return path


def _to_table(found: Calibration, network: Network, precision: str) -> Table:
    table = Table("ranks", "stage", "elements", "forward ms", "backward ms", title=found.device)
    for name, rows in found.kernels.items():
        if name.startswith(f"{precision}: "):
            for row in rows:
                times = (f"{1e3 * each:.3g}" for each in (row.forward, row.backward))
                table.add_row(str(row.ranks), name.partition(": ")[2], f"{row.numel:,}", *times)
    for num, link in sorted(found.links.items()):
        words = f"{link.latency_seconds * 1e6:.3g} us, {link.bytes_per_second / 1e9:.3g} GB/s"
        table.add_row(str(num), f"messages: {words}")
    return table
