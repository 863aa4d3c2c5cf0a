"""Does the planner foresee what we measure ourselves?

    python benchmarks/plan_ours.py           ranks on this machine's CPUs: 12 meshes of 3 networks
    python benchmarks/plan_ours.py --gpu     one GPU: kernels of a rank's shard, peaks of memory

First the kernels of each network are calibrated as `hyperslab plan calibrate` does it: on one rank,
without the others. Then steps are measured and held against what the planner says of each mesh.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import hyperslab as hs
from hyperslab.models import CosmoFlow, UNet3d
from hyperslab.models.mesh_tangling import mesh_2k
from hyperslab.planner.calibrate import measure_kernels, measure_rank, measure_values
from hyperslab.planner.cost import Costs, Job
from hyperslab.planner.machine import load_machine
from hyperslab.planner.measured import Calibration
from hyperslab.planner.memory import step_memory
from hyperslab.planner.read_network import read_network
from hyperslab.planner.shards import Cut, Shards
from hyperslab.testing import Team

AXES = ("sample", "channel", "depth", "height", "width")
BATCH = 4
NETWORKS = {
    "CosmoFlow": (lambda: CosmoFlow(64, base_channels=8, dropout=0.0), (4, 64, 64, 64)),
    "U-Net": (lambda: UNet3d(1, 2, base_channels=8, levels=3), (1, 48, 48, 48)),
    "mesh-tangling": (lambda: mesh_2k(base_channels=16), (18, 256, 256)),
}
MESHES_3D = (
    {}, {"sample": 2}, {"depth": 2}, {"width": 2}, {"channel": 2}, {"sample": 4}, {"depth": 4},
    {"channel": 4}, {"sample": 2, "depth": 2}, {"depth": 2, "height": 2},
    {"sample": 2, "channel": 2}, {"channel": 2, "depth": 2},
)  # fmt: skip
MESHES_2D = (
    {}, {"sample": 2}, {"height": 2}, {"width": 2}, {"channel": 2}, {"sample": 4}, {"height": 4},
    {"channel": 4}, {"sample": 2, "height": 2}, {"height": 2, "width": 2},
    {"sample": 2, "channel": 2}, {"channel": 2, "height": 2},
)  # fmt: skip


def cut_of(axes):
    return Cut(tuple(axes.get(axis, 1) for axis in AXES))


# CPUs


def calibrate(name, ranks, shares):
    make, shape = NETWORKS[name]
    return measure_rank(read_network(make(), shape, name), "fp32", ranks, "cpu", shares)


def least_step(name, axes, repeats):
    make, shape = NETWORKS[name]
    mesh = hs.init(**axes, device="cpu")
    torch.manual_seed(0)
    model = hs.parallelize(make(), mesh)
    x = hs.shard(torch.randn(BATCH, *shape), mesh)
    with torch.no_grad():
        target = torch.zeros_like(model(x))
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        for weight in model.parameters():
            weight.grad = None
        F.mse_loss(model(x), target).backward()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def on_cpus(args):
    rows = []
    for name in args.networks:
        make, shape = NETWORKS[name]
        network = read_network(make(), shape, name)
        meshes = MESHES_2D if len(shape) == 3 else MESHES_3D
        by_ranks = {}
        for ranks in (1, 2) if args.small else (1, 2, 4):
            with Team(ranks, timeout_seconds=600) as team:
                by_ranks[ranks] = team.run(calibrate, name, ranks, (1, 2, 4))[0]
                for axes in meshes:
                    if cut_of(axes).num_ranks == ranks:
                        seconds = max(team.run(least_step, name, axes, args.repeats))
                        rows.append({"network": name, "axes": axes, "measured": seconds})
        for row in rows:
            if row["network"] == name:
                cut = cut_of(row["axes"])
                row["predicted"] = predicted(network, by_ranks[1], by_ranks[cut.num_ranks], cut)
    return rows


def predicted(network, alone, together, cut):
    machine = together.machine(alone.machine(load_machine("laptop"), 1), cut.num_ranks)
    job = Job(network, BATCH, "fp32", "sgd", source="none", recorded=False)
    return Costs(job, machine, together.kernel_times).step(cut).seconds


# One GPU


def on_gpu(args):
    from gpu.record import Record
    from gpu.shards import COLUMNS, cells, make_networks, measure_shards

    device = torch.device("cuda", 0)
    mesh = hs.init(device=device)
    known = json.loads(args.shards.read_text())["kernels"] if args.shards else []
    known = [row for row in known if "ms" in row]
    names = {row["network"] for row in known}
    record = Record("shards", COLUMNS, cells, folder=None, budget=args.budget)
    measure_shards(
        device,
        record,
        small=False,
        wanted=lambda n, axes: n.case.shape[-1] != 256 and f"{n.name} {n.case}" not in names,
    )
    rows = []
    for each in make_networks(small=False):
        name = f"{each.name} {each.case}"
        own = [row for row in (*known, *record.rows) if row["network"] == name and "ms" in row]
        if own:
            network = read_network(each.case.make(), each.case.shape[1:], name)
            begun = time.perf_counter()
            kernels = measure_kernels(network, "bf16", mesh, 1)
            print(f"calibrated {name} in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
            calibration = Calibration("", "", "", kernels, {}, measure_values(device))
            rows += [gpu_row(network, calibration, row) for row in own]
    return rows


def gpu_row(network, calibration, row):
    cut = cut_of(row["axes"])
    machine = calibration.machine(load_machine("dgx-h200"), 1)
    job = Job(network, 1, "bf16", "sgd", source="none")
    cost = Costs(job, machine, calibration.kernel_times).step(cut)
    shards = Shards(network, cut, 1)
    memory = step_memory(shards, precision="bf16", optimizer="sgd", fuses=True)
    return {
        "network": network.name,
        "axes": row["axes"],
        "measured": row["ms"] / 1e3,
        "predicted": cost.kernels,
        "measured GiB": row["peak_gib"],
        "predicted GiB": memory.total / 2**30,
    }


# Both


def rank_correlation(first, second):
    """Spearman's: of the places in the two orders."""
    places = [{v: i for i, v in enumerate(sorted(each))} for each in (first, second)]
    n = len(first)
    apart = sum((places[0][a] - places[1][b]) ** 2 for a, b in zip(first, second, strict=True))
    return 1 - 6 * apart / (n * (n * n - 1))


def bars(rows, *, gpu):
    """(what, measured, "<=" or ">=", bar)."""
    found = []
    for name in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == name]
        measured, told = ([row[key] for row in own] for key in ("measured", "predicted"))
        off = [abs(t / m - 1) for m, t in zip(measured, told, strict=True)]
        if gpu:
            found.append(
                (f"{name}: median error of a shard's kernels", statistics.median(off), "<=", 0.1)
            )
            continue
        found.append((f"{name}: rank correlation", rank_correlation(measured, told), ">=", 0.9))
        chosen = min(own, key=lambda row: row["predicted"])
        found.append(
            (f"{name}: predicted best, of the best", chosen["measured"] / min(measured), "<=", 1.1)
        )
    return found


def show(rows, found):
    table = Table("network", "mesh", "measured ms", "predicted ms", "off", "GiB", "predicted GiB")
    for row in rows:
        off = row["predicted"] / row["measured"] - 1
        memory = [
            f"{row[key]:.2f}" if key in row else "" for key in ("measured GiB", "predicted GiB")
        ]
        times = [f"{row[key] * 1e3:.2f}" for key in ("measured", "predicted")]
        table.add_row(row["network"], str(cut_of(row["axes"])), *times, f"{off:+.0%}", *memory)
    console = Console(stderr=True, width=140)
    console.print(table)
    for what, measured, sign, bar in found:
        met = measured <= bar if sign == "<=" else measured >= bar
        console.print(f"{what}: {measured:.3g} (bar {sign} {bar}) {'met' if met else 'MISSED'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, default=200, help="begin no shard after as many s")
    parser.add_argument("--shards", type=Path, help="what gpu_split.py --json printed")
    parser.add_argument("--small", action="store_true", help="one network on 1 and 2 ranks")
    parser.add_argument("--json", action="store_true", help="print JSON, and tables to stderr")
    args = parser.parse_args()
    if args.small:
        args.networks, args.repeats = ["mesh-tangling"], 1
    rows = on_gpu(args) if args.gpu else on_cpus(args)
    found = bars(rows, gpu=args.gpu)
    show(rows, found)
    if args.json:
        print(json.dumps({"rows": rows, "bars": found}, indent=1))


if __name__ == "__main__":
    main()
