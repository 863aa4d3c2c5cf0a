"""What does a Slab cost where there is next to nothing to compute?

    python benchmarks/overhead.py

Prints the time of relu on a tiny Slab and on a plain tensor; "limit" is that on the least object
that carries a tensor through torch functions. Then of forward and backward through 5 x (conv +
relu) on 2 ranks split along depth against a blocking halo exchange written by hand (from
halo_conv.py). Weights get the gradient of one process, ours by themselves; "averaged" does so by
hand too, in one message after the backward pass, and "by hand" does not. "limit" is by hand with
averaged gradients, whose messages go as ours do: by sockets, not by gloo. A step of a network on
one rank, with tensors so small that the host's time is all there is, is compared with that of plain
PyTorch, without CUDA's part of it. The variants of a comparison take turns; shown are the median
and the fastest.
"""

import argparse
import copy
import json
import runpy
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.models import CosmoFlow, ResNet50
from hyperslab.testing import Team


def summary(samples):
    return {
        name: {"median": statistics.median(times), "fastest": min(times)}
        for name, times in samples.items()
    }


@dataclass(frozen=True)
class LeastCarrier:
    """The least that a piece with its layout can be: a table of rules, and no checks."""

    local: torch.Tensor
    layout: object
    mesh: object

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return RULES[function](*args, **(kwargs or {}))


def carry_relu(x):
    return LeastCarrier(torch.relu(x.local), x.layout, x.mesh)


RULES = {torch.relu: carry_relu}


def relu_times(repeats):
    """Microseconds of one relu on a plain tensor, on a Slab and on the least that carries one."""
    slab = hs.shard(torch.randn(1, 2, 8, 4, 4), hs.init(depth=2, device="cpu"))
    limit = LeastCarrier(slab.local, slab.layout, slab.mesh)
    values = {"plain": slab.local, "Slab": slab, "limit": limit}
    samples = {name: [] for name in values}
    for _ in range(repeats):
        for name, value in values.items():
            start = time.perf_counter()
            for _ in range(1000):
                torch.relu(value)
            samples[name].append((time.perf_counter() - start) * 1e3)
    return summary(samples)


def limit_conv(by_hand, mesh):
    """The convolution by hand, with its halos sent by the sockets of ``mesh``."""

    class SocketHalo(by_hand["BlockingHalo"]):
        @staticmethod
        def forward(ctx, x):
            below, above = swap(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous())
            return torch.cat([below, x, above], 2)

        @staticmethod
        def backward(ctx, grad):
            below, above = swap(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous())
            own = grad[:, :, 1:-1].clone()
            own[:, :, :1] += below
            own[:, :, -1:] += above
            return own

    def swap(down, up):
        below, above = torch.zeros_like(down), torch.zeros_like(up)
        sent, received = (down, below) if mesh.rank else (up, above)
        exchange_(mesh, sent, received)
        return below, above

    class SocketConv(nn.Conv3d):
        def forward(self, x):
            halo = SocketHalo.apply(x)
            return nn.functional.conv3d(halo, self.weight, self.bias, self.stride, (0, 1, 1))

    return SocketConv


def exchange_(mesh, sent, received):
    """Sends a tensor to the other one of two ranks, and fills another by what that sends."""
    other = 1 - mesh.rank
    mesh.sockets.send(other, 0, sent, 300.0)
    mesh.sockets.receive(other, 0, received, 300.0).wait()


def stack(conv):
    return nn.Sequential(
        *[layer for _ in range(5) for layer in (conv(4, 4, 3, padding=1), nn.ReLU())]
    )


def stack_times(repeats):
    """Microseconds of forward and backward through the stack, ours and by hand."""
    by_hand = runpy.run_path(str(Path(__file__).with_name("halo_conv.py")))
    x = torch.randn(1, 4, 8, 8, 8)
    mesh = hs.init(depth=2, device="cpu")
    piece = x.chunk(2, 2)[mesh.rank].contiguous().requires_grad_()
    slab = hs.from_local(piece.detach(), mesh, x.shape)
    slab.local.requires_grad_()
    ours, hand = stack(nn.Conv3d), stack(by_hand["HandConv"])
    limit = stack(limit_conv(by_hand, mesh))
    seed = torch.randn(piece.shape)

    def run_ours():
        ours(slab).local.backward(seed)

    def run_by_hand():
        hand(piece).backward(seed)

    def run_averaged():
        run_by_hand()
        average(hand, dist.all_reduce)

    def run_limit():
        limit(piece).backward(seed)
        average(limit, add_from_other)

    def add_from_other(mine):
        exchange_(mesh, mine, theirs := torch.empty_like(mine))
        mine += theirs

    def average(module, add_up):
        grads = [parameter.grad for parameter in module.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads]) / mesh.num_ranks
        add_up(flat)
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    variants = {"ours": run_ours, "by hand": run_by_hand, "averaged": run_averaged}
    variants |= {"limit": run_limit} if mesh.sockets else {}
    samples = {name: [] for name in variants}
    for number in range(repeats + 1):
        for name, run in variants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(20):
                run()
            if number:
                samples[name].append((time.perf_counter() - start) / 20 * 1e6)
    return summary(samples)


NETWORKS = {
    "CosmoFlow": (lambda: CosmoFlow(8, base_channels=1), (2, 4, 8, 8, 8), 4),
    "ResNet-50": (lambda: ResNet50(4, base_channels=1), (2, 3, 32, 32), 4),
}
"""Each with the shape of its batch and the number of its outputs."""


def step_times(repeats, name):
    """Microseconds of forward, loss and backward on one rank, of plain PyTorch and ours."""
    make, shape, outputs = NETWORKS[name]
    mesh, plain = hs.init(device="cpu"), make()
    ours = hs.parallelize(copy.deepcopy(plain), mesh)
    batch = torch.randn(shape), torch.randn(shape[0], outputs)
    sides = {"plain": (plain, batch), "ours": (ours, [hs.shard(each, mesh) for each in batch])}
    samples = {side: [] for side in sides}
    for number in range(10 * repeats + 10):
        for side, (network, (x, target)) in sides.items():
            network.zero_grad()
            start = time.perf_counter()
            F.mse_loss(network(x), target).backward()
            if number >= 10:
                samples[side].append((time.perf_counter() - start) * 1e6)
    return summary(samples)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="20 repeats, some 20 s")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    repeats = 20 if options.quick else options.repeats
    with Team(2, timeout_seconds=300) as team:
        relu = team.run(relu_times, repeats)[0]
        convs = team.run(stack_times, repeats)
    with Team(1, timeout_seconds=300) as team:
        steps = {name: team.run(step_times, repeats, name)[0] for name in NETWORKS}
    slower = {name: max((rank[name] for rank in convs), key=_fastest) for name in convs[0]}
    report = {"relu_us": relu, "conv_stack_us": slower, "step_us": steps}
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print("microseconds                                      median   fastest")
    for name, row in relu.items():
        print(f"relu, {name:40} {row['median']:9.2f} {row['fastest']:9.2f}")
    for name, row in slower.items():
        print(f"5 x (conv + relu), 2 ranks, {name:18} {row['median']:9.0f} {row['fastest']:9.0f}")
    for name in [name for name in slower if name != "ours"]:
        ratios = [slower["ours"][key] / slower[name][key] for key in ("median", "fastest")]
        print(f"ours / {name:39} {ratios[0]:9.2f} {ratios[1]:9.2f}")
    for name, sides in steps.items():
        for side, row in sides.items():
            what = f"step of {name}, 1 rank, {side}"
            print(f"{what:46} {row['median']:9.0f} {row['fastest']:9.0f}")


def bars(report):
    """What is measured, its value, how it must compare and with what."""
    stack, relu = report["conv_stack_us"], report["relu_us"]
    host = {
        f"host time of a step of {name}, 1 rank, of plain": step["ours"]["median"]
        / step["plain"]["median"]
        for name, step in report["step_us"].items()
    }
    of_averaged = {name: row["median"] / stack["averaged"]["median"] for name, row in stack.items()}
    what = "5 x (conv + relu), 2 ranks, of by hand with averaged gradients"
    return [
        *((what, value, "<=", 1.1) for what, value in host.items()),
        ("relu on a Slab, us", relu["Slab"]["median"], "<=", 5.0, relu["limit"]["median"]),
        (what, of_averaged["ours"], "<=", 1.1, of_averaged.get("limit")),
    ]


def _fastest(row):
    return row["fastest"]


if __name__ == "__main__":
    main()
