"""Are dense layers that ranks share as fast as torch's DTensor makes them, and as one GPU could be?

On CPUs: forward and backward passes of inputs - hidden - inputs on 1, 2 and 4 ranks, each beside
torch.distributed.tensor.parallel on the same work, in turns, with the least time of each. With
--gpu, on one GPU: passes against the rate of a single product and against the bytes that must be
moved, and a step of the widest network that fits.
"""

import argparse
import gc
import json
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hyperslab as hs
from hyperslab.models import DenseAutoencoder
from hyperslab.testing import Team

INPUTS = 256 * 256 * 3
BLOCKS = {"*": {"split": "blocks"}}
BATCHES = (8, 64, 512, 2048)
SIDES = ("hyperslab", "hyperslab blocks", "DTensor row-col", "DTensor col-row", "torch")


# CPUs


def net(inputs, hidden):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, inputs))


def ours(inputs, hidden, batch, axes, plan=None):
    mesh = hs.init(**axes, device="cpu")
    model = hs.parallelize(net(inputs, hidden), mesh, plan=plan)
    x = hs.shard(torch.ones(batch, inputs), mesh)
    return partial(passes, model, x, x)


def dtensor(inputs, hidden, batch, ranks, columns_first):
    """torch's own: what is between the layers, or what is around them, stays cut."""
    mesh = init_device_mesh("cpu", (ranks,))
    x = torch.ones(batch, inputs)
    if columns_first:
        styles = RowwiseParallel(), ColwiseParallel(output_layouts=Shard(-1))
        x = x.chunk(ranks, 1)[mesh.get_local_rank()].contiguous()
        target = x
    else:
        styles, target = (ColwiseParallel(), RowwiseParallel()), x
    model = parallelize_module(net(inputs, hidden), mesh, dict(zip("02", styles, strict=True)))
    return partial(passes, model, x, target)


def passes(model, x, target):
    for weight in model.parameters():
        weight.grad = None
    F.mse_loss(model(x), target).backward()


def sides(inputs, hidden, batch, ranks):
    """The passes to be measured, by side."""
    if ranks == 1:
        x = torch.ones(batch, inputs)
        found = {"torch": partial(passes, net(inputs, hidden), x, x)}
        return found | {"hyperslab": ours(inputs, hidden, batch, {})}
    found = {
        "hyperslab": ours(inputs, hidden, batch, {"channel": ranks}),
        "DTensor row-col": dtensor(inputs, hidden, batch, ranks, True),
        "DTensor col-row": dtensor(inputs, hidden, batch, ranks, False),
    }
    if ranks == 4:
        axes = {"channel": 2, "sample": 2}
        found["hyperslab blocks"] = ours(inputs, hidden, batch, axes, BLOCKS)
    return found


def least_times(inputs, hidden, batch, ranks, rounds, threads):
    """Seconds of the passes of each side, which take turns."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    found = sides(inputs, hidden, batch, ranks)
    times = {name: [] for name in found}
    for _ in range(rounds + 1):
        for name, run in found.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(each[1:]) for name, each in times.items()}


def on_cpus(args):
    rows = []
    cases = [("strong", r, args.hidden, b, 1) for b in args.batches for r in (1, 2, 4)]
    cases += [("weak", r, args.hidden * r // 4, args.batches[0], 1) for r in (1, 2, 4)]
    cases += [("threads", 1, args.hidden, args.batches[-1], threads) for threads in (1, 2)]
    for question, ranks, hidden, batch, threads in cases:
        with Team(ranks, timeout_seconds=600) as team:
            work = (args.inputs, hidden, batch, ranks, args.rounds, threads)
            found = team.run(least_times, *work)
        seconds = {name: max(each[name] for each in found) for name in found[0]}
        about = {"question": question, "ranks": ranks, "hidden": hidden, "batch": batch}
        rows.append({**about, "threads": threads, "seconds": seconds})
    return rows


# One GPU


def timed(run, rounds):
    """The least seconds of ``run`` on the GPU."""
    times = []
    for _ in range(rounds + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return min(times[1:])


def on_gpu(args):
    mesh = hs.init(device="cuda")
    report = {"device": torch.cuda.get_device_name()} | rates(args)
    report["passes"] = gpu_passes(mesh, args, report)
    report["widest"] = [widest(mesh, args, *each) for each in WIDEST]
    return report


def rates(args):
    """What one product computes a second, at the shapes of a layer, and a copy moves."""
    x = torch.randn(2048, args.inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(args.hidden, args.inputs, device="cuda", dtype=torch.bfloat16)
    product = timed(lambda: x @ weight.T, args.rounds)
    halves = weight.view(-1)[: weight.numel() // 2 * 2].chunk(2)
    copied = timed(lambda: halves[0].copy_(halves[1]), args.rounds)
    return {
        "product TFLOP/s": 2 * x.shape[0] * weight.numel() / product / 1e12,
        "copy TB/s": 2 * halves[0].nbytes / copied / 1e12,
    }


def gpu_passes(mesh, args, known):
    """Ours and plain torch on the same weights."""
    start = time.perf_counter()
    with torch.device("meta"):
        model = DenseAutoencoder(args.inputs, (args.hidden,)).bfloat16()
    plain = model.forward
    model = hs.parallelize(model, mesh)
    torch.cuda.synchronize()
    rows = [{"seconds to make": time.perf_counter() - start}]
    numel = args.inputs * args.hidden
    for batch in (8, 2048):
        x = torch.ones(batch, args.inputs, device="cuda", dtype=torch.bfloat16)
        slab = hs.shard(x, mesh)
        seconds = {
            "hyperslab": timed(partial(passes, model, slab, slab), args.rounds),
            "torch": timed(partial(passes, _Plain(model, plain), x, x), args.rounds),
        }
        # Two products forward, two for gradients of weights, one for that between the layers.
        flops = 2 * batch * numel * 5
        # Weights once forward, the second once more, gradients of both written once; 2 bytes each.
        nbytes = 2 * numel * 5
        rate = flops / seconds["hyperslab"] / 1e12 / known["product TFLOP/s"]
        moved = nbytes / 1e12 / known["copy TB/s"] / seconds["hyperslab"]
        rows.append({"batch": batch, "seconds": seconds, "of product": rate, "of copy": moved})
    for weight in model.parameters():
        weight.grad = None
    return rows


class _Plain:
    """The module without hyperslab: its own forward, on plain tensors."""

    def __init__(self, model, forward):
        self.parameters, self.forward = model.parameters, forward

    def __call__(self, x):
        return self.forward(x)


WIDEST = (("Adam", 8, 1e-4), ("SGD", 4, 10.0))
"""Bytes of a bfloat16 weight, with its gradient and the optimizer's state; a rate of learning."""


def widest(mesh, args, name, nbytes, rate):
    """Two steps at nearly the largest width that memory allows, and what they took."""
    gc.collect()  # modules refer to themselves
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hidden = int(args.share * free / (2 * args.inputs * nbytes)) // 100 * 100
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = DenseAutoencoder(args.inputs, (hidden,)).bfloat16()
    model = hs.parallelize(model, mesh)
    make = getattr(torch.optim, name)
    optimizer = make(model.parameters(), rate, fused=True)
    x = hs.shard(torch.rand(64, args.inputs, device="cuda", dtype=torch.bfloat16), mesh)
    losses = []
    for _ in range(2):
        loss = F.mse_loss(model(x).float(), x.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated()
    about = {"optimizer": name, "hidden": hidden, "peak GiB": peak / 2**30}
    return about | {"free GiB": free / 2**30, "losses": losses}


def bars(report):
    """(what, measured, "<=" or ">=", bar) for what ``--json`` prints."""
    found = []
    for row in report.get("cpu", []):
        seconds = row["seconds"]
        others = [each for name, each in seconds.items() if not name.startswith("hyperslab")]
        mine = [each for name, each in seconds.items() if name.startswith("hyperslab")]
        about = "{question}, {ranks} ranks, batch {batch}: of the best other".format(**row)
        found.append((about, min(mine) / min(others), "<=", 1.0))
    if "gpu" in report:
        few, many = report["gpu"]["passes"][1:]
        found.append(("batch 2048, of a product's rate", many["of product"], ">=", 0.6))
        found.append(("batch 8, of a copy's rate", few["of copy"], ">=", 0.7))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="one GPU rather than ranks on CPUs")
    parser.add_argument("--small", action="store_true", help="a few numbers, to see that it runs")
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.95, help="of free memory, of the widest")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.inputs = args.inputs or (64 if args.small else INPUTS if args.gpu else 12288)
    args.hidden = args.hidden or (16 if args.small else 50000 if args.gpu else 2048)
    if args.small:
        args.batches, args.rounds = [8], 1
    report = {"gpu": on_gpu(args)} if args.gpu else {"cpu": on_cpus(args)}
    if args.json:
        print(json.dumps(report, indent=1))
        return
    if args.gpu:
        print(json.dumps(report["gpu"], indent=1))
        return
    for row in report["cpu"]:
        shown = [
            f"{name} {1e3 * row['seconds'][name]:.1f} ms"
            for name in SIDES
            if name in row["seconds"]
        ]
        print(
            "{question:8} ranks {ranks} hidden {hidden} batch {batch}".format(**row),
            *shown,
            sep="  ",
        )


if __name__ == "__main__":
    main()
