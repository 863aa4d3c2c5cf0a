"""What does a Slab cost where there is next to nothing to compute?

    python benchmarks/overhead.py

Prints the time of relu on a tiny Slab and on a plain tensor, and of forward and backward through
5 x (conv + relu) on 2 ranks split along depth against a blocking halo exchange written by hand
(from halo_conv.py). Weights get the gradient of one process, ours by themselves; "averaged" does so
by hand too, in one message after the backward pass, and "by hand" does not. "limit" is by hand with
averaged gradients, whose messages go as ours do: by sockets, not by gloo. The variants of a
comparison take turns; shown are the median and the fastest.
"""

import argparse
import json
import runpy
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hyperslab as hs
from hyperslab.testing import Team


def summary(samples):
    return {
        name: {"median": statistics.median(times), "fastest": min(times)}
        for name, times in samples.items()
    }


def relu_times(repeats):
    """Microseconds of one relu on a plain tensor and on a Slab, on one rank of a mesh."""
    x = torch.randn(1, 2, 4, 4, 4)
    slab = hs.shard(torch.randn(1, 2, 8, 4, 4), hs.init(depth=2, device="cpu"))
    samples = {"plain": [], "Slab": []}
    for _ in range(repeats):
        for name, value in (("plain", x), ("Slab", slab)):
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
    slower = {name: max((rank[name] for rank in convs), key=_fastest) for name in convs[0]}
    report = {"relu_us": relu, "conv_stack_us": slower}
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


def bars(report):
    """What is measured, its value, how it must compare and with what."""
    stack = report["conv_stack_us"]
    of_averaged = {name: row["median"] / stack["averaged"]["median"] for name, row in stack.items()}
    what = "5 x (conv + relu), 2 ranks, of by hand with averaged gradients"
    return [
        ("relu on a Slab, us", report["relu_us"]["Slab"]["median"], "<=", 5.0),
        (what, of_averaged["ours"], "<=", 1.1, of_averaged.get("limit")),
    ]


def _fastest(row):
    return row["fastest"]


if __name__ == "__main__":
    main()
