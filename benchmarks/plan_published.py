"""Does the planner predict what was published?

    python benchmarks/plan_published.py
    python benchmarks/plan_published.py --json

CosmoFlow on Lassen with LBANN (Oyama et al., training large 3-D CNNs with hybrid parallelism):
scaling over nodes of 4 GPUs, and memory for one sample. All rows use one description of the
machine, `planner/machines/lassen.toml`. What is assumed of the runs:

- float32, Adam, samples of 16-bit numbers that the nodes keep in memory;
- a node trains 64 samples of 128^3, 8 of 256^3 or 1 of 512^3 in a step: as many as fit, each on
  one GPU, and one of 512^3 on four;
- LBANN sums the gradients of every tensor by itself, and one of the GPUs that share a sample gets
  all of it from the host before a step and sends the others their parts;
- of the ways to cut a sample, the fastest.

Prints the published value, the predicted one, how far off it is and how far it may be. Exits with
1 if it is farther.
"""

import json
from functools import cache
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from hyperslab.models import CosmoFlow
from hyperslab.planner.cost import Costs, Job
from hyperslab.planner.machine import load_machine
from hyperslab.planner.memory import lbann_memory
from hyperslab.planner.read_network import read_network
from hyperslab.planner.search import meshes

GPUS_PER_NODE = 4
SAMPLES_PER_NODE = {128: 64, 256: 8, 512: 1}
WEAK_SCALING = {128: 119, 256: 120, 512: 111}
MEMORY_GIB = {128: 0.824, 256: 6.59, 512: 52.7}
TERAFLOP = 3.55
"""Of one sample of 512^3, forward and backward, as published."""


class Row(NamedTuple):
    what: str
    published: float
    predicted: float
    bar: float
    """By which share the prediction may be off."""

    @property
    def off(self):
        return self.predicted / self.published - 1

    @property
    def is_met(self):
        return abs(self.off) <= self.bar


def predictions(machine=None):
    """All rows; ``machine`` is Lassen unless another description is to be tried."""
    machine = machine or load_machine("lassen")
    networks = {size: _network(size) for size in WEAK_SCALING}

    def seconds(size, nodes, batch):
        return _fastest(networks[size], machine, nodes, batch)

    def weak(size):
        batch = SAMPLES_PER_NODE[size]
        return 128 * seconds(size, 1, batch) / seconds(size, 128, 128 * batch)

    rows = [
        Row(f"speed on 128 nodes over 1, {size}^3", published, weak(size), 0.05)
        for size, published in WEAK_SCALING.items()
    ]
    doubled = seconds(512, 64, 64) / seconds(512, 128, 64)
    strong = seconds(512, 1, 1) / seconds(512, 4, 1)
    rate = 128 * TERAFLOP / 1000 / seconds(512, 128, 128)
    rows += [
        Row("speed on 128 nodes over 64, 64 samples of 512^3", 1.19, doubled, 0.05),
        Row("speed on 4 nodes over 1, one sample of 512^3", 2.28, strong, 0.15),
        Row("PFlop/s on 128 nodes, 512^3 (fitted)", 1.42, rate, 0.05),
    ]
    return rows + [
        Row(f"GiB for a sample of {size}^3", published, lbann_memory(network) / 2**30, 0.02)
        for (size, network), published in zip(networks.items(), MEMORY_GIB.values(), strict=True)
    ]


@cache
def _network(size):
    return read_network(CosmoFlow(size=size), (4, size, size, size), f"cosmoflow-{size}")


def _fastest(network, machine, nodes, batch):
    job = Job(network, batch, "fp32", "adam", bucket_nbytes=0, whole_samples=True)
    gpus = nodes * GPUS_PER_NODE
    groups = min(batch, gpus)
    costs = Costs(job, machine)
    return min(
        costs.step(cut).seconds
        for cut in meshes(network, gpus, batch)
        if cut.size("sample") == groups and cut.size("channel") == 1
    )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def main(as_json):
    rows = predictions()
    if as_json:
        shown = [row._asdict() | {"off": row.off, "met": row.is_met} for row in rows]
        click.echo(json.dumps(shown, indent=2))
    else:
        Console(width=100).print(_table(rows))
    raise SystemExit(not all(row.is_met for row in rows))


def _table(rows):
    table = Table("CosmoFlow on Lassen", "published", "predicted", "off by", "bar", "")
    for row in rows:
        numbers = (
            f"{row.published:.4g}",
            f"{row.predicted:.4g}",
            f"{row.off:+.1%}",
            f"{row.bar:.0%}",
        )
        table.add_row(row.what, *numbers, "met" if row.is_met else "MISSED")
    return table


if __name__ == "__main__":
    main()
