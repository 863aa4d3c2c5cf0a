"""Does the planner foresee the memory that a training step takes?

    python benchmarks/plan_memory.py               CosmoFlow, U-Net, ResNet-50 on 1 to 4 CPU ranks
    python benchmarks/plan_memory.py --networks U-Net --meshes depth=2 channel=2

Each step (forward, backward, Adam) runs whole and with activation checkpoints, on one mesh after
the other. Its peak is what torch's allocator has handed out at most, with weights, gradients, the
optimizer's state and the sample: what the C library keeps of freed memory is not in it.
"""

import argparse
import gc
import json
import math

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import hyperslab as hs
from hyperslab.layout import AXES
from hyperslab.models import CosmoFlow, ResNet50, UNet3d
from hyperslab.nn.slab import Slab
from hyperslab.planner.memory import step_memory
from hyperslab.planner.read_network import read_network
from hyperslab.planner.search import recomputable
from hyperslab.planner.shards import Cut, Shards
from hyperslab.testing import Team
from hyperslab.train.model import checkpoint_activations

NETWORKS = {
    "CosmoFlow": (lambda: CosmoFlow(64), (4, 64, 64, 64), 2),
    "U-Net": (lambda: UNet3d(1, 2, base_channels=8, levels=3), (1, 64, 64, 64), 2),
    "ResNet-50": (ResNet50, (3, 160, 160), 4),
}
SMALL = {
    "CosmoFlow": (lambda: CosmoFlow(16, base_channels=16), (4, 16, 16, 16), 2),
    "U-Net": (lambda: UNet3d(1, 2, base_channels=16, levels=2), (1, 16, 16, 16), 2),
    "ResNet-50": (ResNet50, (3, 64, 64), 4),
}
"""Name: what makes the network, the shape of a sample, and samples in a step."""
MESHES = {
    4: ({}, {"sample": 2}, {"depth": 2}, {"channel": 2}, {"height": 2, "width": 2}),
    3: ({}, {"sample": 2}, {"height": 2}, {"channel": 2}, {"height": 2, "width": 2}),
}
"""By the dims of a sample."""


def step(model, optimizer, x):
    out = model(x)
    loss = out.square().mean()
    del out
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_nbytes(run):
    """The most bytes that ``run`` has of the allocator at once, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held, most = 0, 0
    for _, nbytes in changes:
        held += nbytes
        most = max(most, held)
    return most


def local(x):
    """What this rank holds of ``x``."""
    return x.local if isinstance(x, Slab) else getattr(x, "_local_tensor", x)


def measured(networks, name, axes, checkpointed):
    """The peak of a step on this rank."""
    make, shape, batch = networks[name]
    mesh = hs.init(**axes, device="cpu")
    torch.manual_seed(0)
    model = make()
    checkpoint_activations(model, checkpointed)
    model = hs.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    x = hs.shard(torch.randn(batch, *shape), mesh)
    step(model, optimizer, x)  # the optimizer makes its state
    gc.collect()
    states = [each for state in optimizer.state.values() for each in state.values()]
    held = [x, *model.parameters(), *model.buffers(), *states]
    return sum(local(each).nbytes for each in held) + peak_nbytes(lambda: step(model, optimizer, x))


def small(*args):
    return measured(SMALL, *args)


def full(*args):
    return measured(NETWORKS, *args)


def compare(networks, name, axes, measure):
    """A row for steps as they are, and one with all activation checkpoints that a plan may ask for.

    ``measure`` has a top level of its own, so that ranks find it.
    """
    make, shape, batch = networks[name]
    network = read_network(make(), shape, name)
    cut = Cut(tuple(axes.get(axis, 1) for axis in AXES))
    shards = Shards(network, cut, batch)
    for checkpointed in ((), recomputable(network, whole_channels=False)):
        options = {"precision": "fp32", "optimizer": "adam", "fuses": False, "on_cpu": True}
        told = step_memory(shards, **options, recomputed=checkpointed).total
        with Team(cut.num_ranks, timeout_seconds=600) as team:
            found = max(team.run(measure, name, axes, checkpointed))
        row = {"network": name, "mesh": str(cut), "checkpoints": len(checkpointed)}
        yield {**row, "predicted": told, "measured": found}


def bars(rows):
    """(what, measured, "<=" or ">=", bar)."""
    off = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    return [("largest error of a peak", max(off), "<=", 0.1)]


def show(rows):
    table = Table("network", "mesh", "checkpoints", "measured MiB", "predicted MiB", "off")
    for row in rows:
        sizes = [f"{row[key] / 2**20:.1f}" for key in ("measured", "predicted")]
        off = f"{row['predicted'] / row['measured'] - 1:+.1%}"
        table.add_row(row["network"], row["mesh"], str(row["checkpoints"]), *sizes, off)
    Console(stderr=True, width=110).print(table)


def axes_of(text):
    """``depth=2,height=2`` or ``one``."""
    pairs = [each.split("=") for each in text.split(",") if text != "one"]
    return {axis: int(size) for axis, size in pairs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--meshes", nargs="+", type=axes_of, help="such as one depth=2,height=2")
    parser.add_argument("--small", action="store_true", help="a small sample on one and two ranks")
    parser.add_argument("--json", action="store_true", help="print JSON, and the table to stderr")
    args = parser.parse_args()
    networks, measure = (SMALL, small) if args.small else (NETWORKS, full)
    rows = []
    for name in args.networks:
        for axes in args.meshes or MESHES[len(networks[name][1])]:
            if not args.small or math.prod(axes.values()) < 4:
                rows += compare(networks, name, axes, measure)
    show(rows)
    (what, worst, sign, bar) = bars(rows)[0]
    print_to = Console(stderr=True)
    print_to.print(f"{what}: {worst:.3f} (bar {sign} {bar}) {'met' if worst <= bar else 'MISSED'}")
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
