"""Does hiding the halo exchange pay? A conv stack split along depth over 2 ranks.

    python benchmarks/halo_conv.py --sizes 64 128 192

Forward and backward of conv 4->16, ReLU, MaxPool2, conv 16->32, ReLU, conv 32->32 stride 2 on one
cube, against the same stack (a) in one process with 2 threads, (b) with a short blocking halo
exchange written by hand, and (c) on NVIDIA's ShardTensor where it is installed. Variants take
turns, so that a busy machine hits all alike; a time is the median of the rounds, the slower rank's.
Memory is the peak of resident memory above what the process held before the step, the larger
rank's; the least of several steps, because the allocator rounds up differently each time.
"""

import argparse
import ctypes
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

import hyperslab as hs
from hyperslab.testing import Team


def conv_stack(conv=nn.Conv3d):
    return nn.Sequential(
        conv(4, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(2),
        conv(16, 32, 3, padding=1),
        nn.ReLU(),
        conv(32, 32, 3, stride=2, padding=1),
    )


class BlockingHalo(Function):
    """One plane from each neighbour, attached by ``cat``; even splits and 3^3 kernels only."""

    @staticmethod
    def swap(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """What the ranks below and above send, or zeros; they get ``down`` and ``up``."""
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        below, above = torch.zeros_like(down), torch.zeros_like(up)
        ops = []
        if rank > 0:
            ops += [dist.P2POp(dist.isend, down, rank - 1), dist.P2POp(dist.irecv, below, rank - 1)]
        if rank < last:
            ops += [dist.P2POp(dist.isend, up, rank + 1), dist.P2POp(dist.irecv, above, rank + 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return below, above

    @staticmethod
    def forward(ctx, x):
        below, above = BlockingHalo.swap(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous())
        return torch.cat([below, x, above], 2)

    @staticmethod
    def backward(ctx, grad):
        below, above = BlockingHalo.swap(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous())
        own = grad[:, :, 1:-1].clone()
        own[:, :, :1] += below
        own[:, :, -1:] += above
        return own


class HandConv(nn.Conv3d):
    def forward(self, x):
        halo = BlockingHalo.apply(x)
        return nn.functional.conv3d(halo, self.weight, self.bias, self.stride, (0, 1, 1))


def build_ours(x):
    mesh = hs.init(depth=2, device="cpu")
    model = hs.parallelize(conv_stack(), mesh)
    piece = x.chunk(2, 2)[mesh.rank].contiguous()

    def step():
        slab = hs.from_local(piece, mesh, x.shape)
        model(slab).sum().backward()

    return step


def build_by_hand(x):
    model = DistributedDataParallel(conv_stack(HandConv))
    piece = x.chunk(2, 2)[dist.get_rank()].contiguous()

    def step():
        total = model(piece).sum()
        dist.all_reduce(total.detach().clone())  # every rank knows the loss, as with a Slab
        total.backward()

    return step


def build_shard_tensor(x):
    from physicsnemo.distributed import DistributedManager, scatter_tensor
    from torch.distributed.tensor.placement_types import Shard

    DistributedManager.initialize()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = DistributedDataParallel(conv_stack())

    def step():
        sharded = scatter_tensor(x, 0, mesh, (Shard(2),), requires_grad=False)
        model(sharded).sum().backward()

    return step


def build_serial(x):
    torch.set_num_threads(2)
    model = conv_stack()
    return lambda: model(x).sum().backward()


BUILDERS = {
    "ours": build_ours,
    "by hand": build_by_hand,
    "ShardTensor": build_shard_tensor,
    "one process": build_serial,
}


def peak_above(step):
    """The peak of resident memory during ``step``, in bytes above what was held before it."""
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps from earlier steps would hide it
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(names, size, rounds):
    """Times (s) and peaks (bytes) of every variant on this rank, in turns."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, size, size, size)
    steps = {name: BUILDERS[name](x) for name in names}
    times = {name: [] for name in names}
    for step in steps.values():
        step()
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    peaks = {name: [] for name in names}
    for number in range(8):
        for name in names if number % 2 == 0 else reversed(names):
            peaks[name].append(peak_above(steps[name]))
    return times, {name: min(found) for name, found in peaks.items()}


def run(names, size, rounds, num_ranks):
    with Team(num_ranks, timeout_seconds=1200) as team:
        ranks = team.run(measure, names, size, rounds)
    results = {}
    for name in names:
        slower = [
            max(per_rank) for per_rank in zip(*(times[name] for times, _ in ranks), strict=True)
        ]
        results[name] = {
            "seconds": statistics.median(slower),
            "seconds_min": min(slower),
            "peak_bytes": max(peaks[name] for _, peaks in ranks),
        }
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="64^3 and 128^3 only, about a minute")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    split = ["ours", "by hand"]
    if importlib.util.find_spec("physicsnemo"):
        split.append("ShardTensor")
    report = {}
    rounds = 7 if options.quick else options.rounds
    for size in [64, 128] if options.quick else options.sizes:
        report[size] = run(split, size, rounds, 2)
        report[size] |= run(["one process"], size, max(3, rounds // 2), 1)
        if not options.json:
            show(size, report[size])
    if options.json:
        print(json.dumps(report, indent=1))


def bars(report):
    """What is measured, its value, how it must compare and with what."""
    found = []
    for size, rows in report.items():
        if int(size) < 128:  # smaller ones say more of the messages than of what hides them
            continue
        ours, hand, serial = (rows[name] for name in ("ours", "by hand", "one process"))
        time_ratio = ours["seconds"] / hand["seconds"]
        memory_ratio = ours["peak_bytes"] / hand["peak_bytes"]
        found += [
            (f"{size}^3, time of by hand", time_ratio, "<=", 1.02),
            (f"{size}^3, memory of by hand", memory_ratio, "<=", 1.02),
            (f"{size}^3, one process of ours", serial["seconds"] / ours["seconds"], ">=", 1.0),
        ]
    return found


def show(size, results):
    print(f"{size}^3" + ("" if "ShardTensor" in results else " (ShardTensor is not installed)"))
    hand = results["by hand"]
    for name, row in results.items():
        ratio = {key: row[key] / max(hand[key], 1e-9) for key in row}
        print(
            f"  {name:12} {row['seconds'] * 1e3:8.1f} ms {ratio['seconds']:5.2f}x by hand"
            f"   fastest {row['seconds_min'] * 1e3:8.1f} ms {ratio['seconds_min']:5.2f}x"
            f"   peak {row['peak_bytes'] / 2**20:7.1f} MiB {ratio['peak_bytes']:5.2f}x"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
