"""What does an exchange between ranks that share one GPU cost, by each transport?

    python benchmarks/gpu_exchange.py --json > exchange.json
    python benchmarks/gpu_exchange.py --small        (tiny, also without a GPU)

`exchange`: each rank fetches one box from each neighbour along depth and sums a few numbers of
each, by `host` (gloo through host memory) and by `device`. `host us` is the time until the host has
launched it, `us` until the GPU has done it, one after the other; `graph us` the same, replayed from
a CUDA graph of 20. Every result is compared with what the neighbours hold.

`step`: forward and backward of CosmoFlow in bf16 on ranks along depth, with the norm of all
gradients. Ranks that share a GPU do the same work together as one rank does.

Kernels of different processes run at the same time only with MPS, which is started unless --no-mps
is given.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from gpu.cases import cosmoflow
from gpu.mps import mps
from gpu.split_step import slowest, step_on_rank
from rich.console import Console
from rich.table import Table

from hyperslab.testing import Team

TRANSPORTS = ("host", "device")
COLUMNS = ("ms", "host_ms", "grad_norm")


@dataclass(frozen=True)
class Exchange:
    """One exchange, in microseconds."""

    ranks: int
    transport: str
    kib: float
    host_us: float
    us: float
    graph_us: float | None


def exchange_on_rank(num_ranks: int, transport: str, sizes: list[int], repeats: int) -> list[dict]:
    """Collective over all ranks."""
    import hyperslab as hs
    from hyperslab.comm.exchange_cost import measure_exchange

    mesh = hs.init(depth=num_ranks, timeout_seconds=60, transport=transport)
    found = [measure_exchange(mesh, size, repeats) for size in sizes]
    return [asdict(Exchange(num_ranks, transport, each.nbytes / 1024, *each[1:])) for each in found]


def measure(options: argparse.Namespace) -> dict:
    sizes = [1 << 10] if options.small else [1 << 14, 1 << 18, 1 << 20, 1 << 22]
    repeats, num_steps = (3, 3) if options.small else (60, 7)
    transports = TRANSPORTS[:1] if options.small else TRANSPORTS
    cubes = [32] if options.small else options.sizes
    report: dict = {"exchange": [], "step": []}
    for num_ranks in (1, 2) if options.small else (1, 2, 4):
        with Team(num_ranks, timeout_seconds=200) as team:
            for transport in transports if num_ranks > 1 else transports[:1]:
                if num_ranks > 1:
                    ranks = team.run(exchange_on_rank, num_ranks, transport, sizes, repeats)
                    report["exchange"] += ranks[0]
                for size in cubes:
                    case = cosmoflow(size, precision="fp32" if options.small else "bf16")
                    axes = {"depth": num_ranks}
                    ranks = team.run(step_on_rank, case, axes, transport, False, num_steps)
                    worst = slowest(ranks)
                    row = {"ranks": num_ranks, "transport": transport, "size": size}
                    report["step"].append(row | {name: worst[name] for name in COLUMNS})
    return report


def print_tables(report: dict) -> None:
    for name, rows in report.items():
        table = Table(*rows[0], title=name) if rows else Table(title=name)
        for row in rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        Console(file=sys.stderr).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="seconds, also without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-mps", action="store_true", help="processes take turns on the GPU")
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512], help="of CosmoFlow")
    options = parser.parse_args()
    with mps(not options.no_mps and not options.small):
        report = measure(options)
    print_tables(report)
    if options.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
