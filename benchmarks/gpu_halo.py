"""What does a halo exchange cost on a GPU, and what does a rank of a split network compute?

    python benchmarks/gpu_halo.py --folder traces --json > halo.json
    python benchmarks/gpu_halo.py --only shards
    python benchmarks/gpu_halo.py --small        (tiny, also without a GPU)

`exchange`: the first three blocks of CosmoFlow in bf16 on ranks that share one GPU, where messages
go through host memory. From a profiler's trace of a step: for each convolution with a halo, how
long its interior and its exchange take (from the first byte that leaves to the last that arrives),
the part of the exchange during which the rank computes, whether all came in order (pack, send
beside the interior, unpack, border), and how many kernels pack and unpack. Then how often the host
waited for the GPU: `cudaEventSynchronize` is the wait for what is to be sent, which only ranks that
share a GPU need. Ranks that share a GPU take turns on it: look at the order, not at the times.
Traces and a picture of each are left in --folder.

`shards`: a step of a network as one rank in the middle of a mesh computes it, halos and all, with
other ranks that do not exist and whose boxes are there at once. `ms` is the time of all kernels of
a step; the host takes `host ms` to launch them, and where that is more, a rank of a real mesh waits
for it. Ideal is the unsplit step's kernels divided by the number of ranks.
`interiors` and `strips` are the parts of convolutions with halos, forward and backward: those that
hide an exchange, and those that wait for it or come before it. shards.json, which has the times of
every block, and shards.md in --folder are written again after every row.

`faces`: boxes of 16x256^3 in one kernel, against a copy for each by torch. The floor counts the
sectors of 32 bytes that are touched.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from gpu.clock import measure_ceilings
from gpu.draw import draw
from gpu.halo_step import trace_step
from gpu.record import Record
from gpu.rows import Bench, Row, Timer, print_rows
from gpu.shards import COLUMNS, cells, measure_shards, shown
from gpu.timeline import read_timeline
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hyperslab.kernels import faces, fused
from hyperslab.layout import AXES, cut_out
from hyperslab.testing import Team

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SECTOR_BYTES = 32
Where = tuple[slice, ...]
SHARED = [{"depth": 2}, {"height": 2}, {"width": 2}, {"depth": 2, "height": 2}]


def measure_exchanges(options: argparse.Namespace, folder: Path) -> list[dict]:
    """Of networks on ranks that share the device."""
    meshes = SHARED[:1] if options.small else SHARED
    size, width = (32, 32) if options.small else (256, 16)
    found = []
    for num_ranks in sorted({math.prod(axes.values()) for axes in meshes}):
        with Team(num_ranks, timeout_seconds=120) as team:
            for axes in meshes:
                if math.prod(axes.values()) == num_ranks:
                    ranks = team.run(
                        trace_step, axes, size, width, str(folder), use_fused=options.fused
                    )
                    found.append(_exchange_report(axes, ranks, folder))
    return found


def _exchange_report(axes: dict[str, int], ranks: Sequence, folder: Path) -> dict:
    timelines = [read_timeline(Path(traced.trace)) for traced in ranks]
    picture = folder / f"{shown(axes).replace(' x ', '-').replace(' ', '')}.png"
    draw(timelines, f"CosmoFlow's first blocks split over {shown(axes)}", picture)
    return {
        "axes": axes,
        "ms": max(traced.ms for traced in ranks),
        "picture": picture.name,
        "ranks": [
            {
                "trace": Path(traced.trace).name,
                "synchronizing": traced.synchronizing,
                "host_syncs": timeline.host_syncs,
                "exchanges": len(timeline.waits),
                "convolutions": [conv.report() for conv in timeline.convolutions],
            }
            for traced, timeline in zip(ranks, timelines, strict=True)
        ],
    }


def measure_faces(options: argparse.Namespace) -> list[Row]:
    bench = Bench(Timer(DEVICE, measure_ceilings(DEVICE), seconds=0.02), options.small)
    extent = 16 if options.small else 256
    shape = (1, 16, extent, extent, extent)
    rows = []
    for last in (False, True):
        x = bench.randn(shape, last=last)
        for name, boxes in _boxes(shape).items():
            what = f"{'channels_last' if last else 'contiguous'}, {name}"
            rows += _face_rows(bench.timer, what, x, boxes)
    return rows


def _boxes(shape: tuple[int, ...]) -> dict[str, list[Where]]:
    """Those that a rank in the middle sends, one wide."""
    found: dict[str, list[Where]] = {f"{axis} faces": [] for axis in AXES[2:]}
    found["all 26 boxes"] = []
    for sides in product(*((slice(0, 1), slice(0, n), slice(n - 1, n)) for n in shape[2:])):
        thin = [
            axis for axis, side in zip(AXES[2:], sides, strict=True) if side.stop - side.start == 1
        ]
        names = [f"{thin[0]} faces", "all 26 boxes"] if len(thin) == 1 else ["all 26 boxes"]
        for name in names if thin else []:
            found[name].append((slice(0, shape[0]), slice(0, shape[1]), *sides))
    return found


def _face_rows(timer: Timer, what: str, x: Tensor, boxes: list[Where]) -> list[Row]:
    cut = cut_out(tuple(boxes), tuple(tuple(x[box].shape) for box in boxes))
    pieces = faces.pack(x, cut)
    touched = sum(_sector_bytes(x[box]) for box in boxes)
    moved = sum(piece.nbytes for piece in pieces)
    assert all(torch.equal(piece, x[box]) for piece, box in zip(pieces, boxes, strict=True))

    def by_torch() -> None:
        for box in boxes:
            x[box].contiguous()

    def add_by_torch() -> None:
        for piece, box in zip(pieces, boxes, strict=True):
            x[box] += piece

    runs: dict[str, Callable[[], object]] = {
        "pack": lambda: faces.pack(x, cut),
        "pack by torch": by_torch,
        "add": lambda: faces.add_(x, pieces, cut),
        "add by torch": add_by_torch,
    }
    rows = []
    for name, run in runs.items():
        nbytes = moved + (2 * touched if "add" in name else touched)
        rows.append(timer.row(f"{what}: {name}", run, nbytes=nbytes))
    return rows


def _sector_bytes(x: Tensor) -> int:
    """What must be read to see ``x``, a view: whole sectors."""
    run = 1
    dims = sorted(zip(x.stride(), x.shape, strict=True))
    for stride, size in dims:
        if size > 1 and stride == run:
            run *= size
    sectors = math.ceil(run * x.itemsize / SECTOR_BYTES)
    return sectors * SECTOR_BYTES * (x.numel() // run)


def show_exchanges(found: list[dict]) -> None:
    columns = (
        "split", "rank", "pass", "interior us", "exchange us", "hidden", "in order", "pack",
        "unpack",
    )  # fmt: skip
    table = Table(*columns, title="Exchanges; kernels that pack and unpack")
    for mesh in found:
        for rank, told in enumerate(mesh["ranks"]):
            for conv in told["convolutions"]:
                table.add_row(
                    shown(mesh["axes"]), str(rank), conv["pass"], f"{conv['interior_us']:.0f}",
                    f"{conv['exchange_us']:.0f}", f"{conv['hidden']:.0%}",
                    "yes" if conv["in_order"] else "NO", str(conv["pack_launches"]),
                    str(conv["unpack_launches"]),
                )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for mesh in found:
        told = mesh["ranks"][0]
        console.print(
            f"{shown(mesh['axes'])}: {mesh['ms']:.1f} ms a step, {told['exchanges']} exchanges; "
            f"the host waits: {told['host_syncs'] or 'never'}, as torch sees it "
            f"{told['synchronizing'] or 'never'}; {mesh['picture']}",
            highlight=False,
        )


SECTIONS = ("exchange", "shards", "faces")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--folder", type=Path, help="for traces, pictures and results")
    parser.add_argument("--budget", type=float, default=100, help="begin no shard after as many s")
    parser.add_argument("--fused", action="store_true", help="use fused kernels on any GPU")
    parser.add_argument("--small", action="store_true", help="tiny; so without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    options.small |= not torch.cuda.is_available()
    return options


def main() -> None:
    options = parse_options()
    if options.fused and DEVICE.type == "cuda":
        fused.FASTER_ON.add(torch.cuda.get_device_capability())
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine()
    report = {"device": name, "torch": torch.__version__, "small": options.small}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for section in options.only:
            report[section] = measure_section(section, options, folder)
            print(f"{section}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            (folder / "report.json").write_text(json.dumps(report, indent=1))
    if options.json:
        print(json.dumps(report, indent=1))


def measure_section(section: str, options: argparse.Namespace, folder: Path) -> list[dict]:
    """What was found, which is also printed."""
    if section == "shards":
        record = Record("shards", COLUMNS, cells, folder=folder, budget=options.budget)
        measure_shards(DEVICE, record, small=options.small)
        if not options.json:
            record.print(width=180)
        return record.rows
    if section == "faces":
        rows = measure_faces(options)
        if not options.json:
            print_rows("boxes of 16x256^3", rows)
        return [asdict(row) for row in rows]
    found = measure_exchanges(options, folder)
    if not options.json:
        show_exchanges(found)
    return found


if __name__ == "__main__":
    main()
