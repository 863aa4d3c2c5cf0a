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

`shards`: a step of CosmoFlow as one rank in the middle of a mesh computes it, halos and all, with
other ranks that do not exist and whose boxes are there at once. Ideal is the unsplit step divided
by the number of ranks.

`faces`: boxes of 16x256^3 in one kernel, against a copy for each by torch. The floor counts the
sectors of 32 bytes that are touched.
"""

import argparse
import gc
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
from gpu.cases import Case, cosmoflow
from gpu.clock import measure_ceilings, median_ms
from gpu.draw import draw
from gpu.halo_step import trace_step
from gpu.lone_rank import LoneTrial, Traffic, nobody_answers
from gpu.rows import Bench, Row, Timer, print_rows
from gpu.timeline import read_timeline
from gpu.trial import SETTINGS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hyperslab.kernels import faces, fused
from hyperslab.layout import AXES
from hyperslab.testing import Team

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SECTOR_BYTES = 32
SPLITS = [
    {}, {"depth": 2}, {"depth": 4}, {"depth": 8}, {"depth": 16}, {"depth": 2, "height": 2},
    {"depth": 4, "height": 2}, {"depth": 4, "height": 4}, {"depth": 2, "height": 2, "width": 2},
]  # fmt: skip
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
    picture = folder / f"{_shown(axes).replace(' x ', '-').replace(' ', '')}.png"
    draw(timelines, f"CosmoFlow's first blocks split over {_shown(axes)}", picture)
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


def measure_shards(options: argparse.Namespace) -> list[dict]:
    """The compute of one rank, for every way to split the network."""
    case = cosmoflow(32, precision="fp32", width=2) if options.small else cosmoflow(512)
    whole_ms = None
    found = []
    for axes in SPLITS[::4] if options.small else SPLITS:
        num_ranks = math.prod(axes.values())
        row: dict = {"axes": axes, "ranks": num_ranks}
        try:
            row |= min(_shard_trials(case, axes, options), key=lambda trial: trial["ms"])
            whole_ms = whole_ms or row["ms"] * num_ranks
            ideal_ms = whole_ms / num_ranks
            row |= {"ideal_ms": ideal_ms, "efficiency": ideal_ms / row["ms"]}
        except Exception as error:  # the other rows are still wanted
            if options.small:
                raise
            row["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        found.append(row)
    return found


def _shard_trials(case: Case, axes: dict[str, int], options: argparse.Namespace) -> Iterator[dict]:
    settings = [setting for setting in SETTINGS if not setting.benchmark]
    for setting in settings[:1] if options.small else settings:
        torch.backends.cudnn.benchmark = setting.benchmark
        trial = LoneTrial(case, axes, setting, DEVICE)
        trial.refill()
        with nobody_answers() as traffic:
            trial.step()
            one_step = Traffic(**asdict(traffic))
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ms = median_ms(trial.step, DEVICE, repeats=1 if options.small else 7)
            blocks = trial.block_times()
        yield {
            "ms": ms,
            "blocks": blocks,
            "traffic": asdict(one_step),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if trial.x.is_cuda else None,
            "setting": str(setting),
        }
        del trial
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


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


def _boxes(shape: tuple[int, ...]) -> dict[str, list[faces.Where]]:
    """Those that a rank in the middle sends, one wide."""
    found: dict[str, list[faces.Where]] = {f"{axis} faces": [] for axis in AXES[2:]}
    found["all 26 boxes"] = []
    for sides in product(*((slice(0, 1), slice(0, n), slice(n - 1, n)) for n in shape[2:])):
        thin = [
            axis for axis, side in zip(AXES[2:], sides, strict=True) if side.stop - side.start == 1
        ]
        names = [f"{thin[0]} faces", "all 26 boxes"] if len(thin) == 1 else ["all 26 boxes"]
        for name in names if thin else []:
            found[name].append((slice(None), slice(None), *sides))
    return found


def _face_rows(timer: Timer, what: str, x: Tensor, boxes: list[faces.Where]) -> list[Row]:
    pieces = faces.pack(x, boxes)
    touched = sum(_sector_bytes(x[box]) for box in boxes)
    moved = sum(piece.nbytes for piece in pieces)
    assert all(torch.equal(piece, x[box]) for piece, box in zip(pieces, boxes, strict=True))

    def by_torch() -> None:
        for box in boxes:
            x[box].contiguous()

    def unpack_by_torch() -> None:
        for piece, box in zip(pieces, boxes, strict=True):
            x[box] = piece

    runs: dict[str, Callable[[], object]] = {
        "pack": lambda: faces.pack(x, boxes),
        "pack by torch": by_torch,
        "unpack": lambda: faces.unpack_(x, boxes, pieces),
        "unpack by torch": unpack_by_torch,
    }
    return [timer.row(f"{what}: {name}", run, nbytes=touched + moved) for name, run in runs.items()]


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
                    _shown(mesh["axes"]), str(rank), conv["pass"], f"{conv['interior_us']:.0f}",
                    f"{conv['exchange_us']:.0f}", f"{conv['hidden']:.0%}",
                    "yes" if conv["in_order"] else "NO", str(conv["pack_launches"]),
                    str(conv["unpack_launches"]),
                )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for mesh in found:
        told = mesh["ranks"][0]
        console.print(
            f"{_shown(mesh['axes'])}: {mesh['ms']:.1f} ms a step, {told['exchanges']} exchanges; "
            f"the host waits: {told['host_syncs'] or 'never'}, as torch sees it "
            f"{told['synchronizing'] or 'never'}; {mesh['picture']}",
            highlight=False,
        )


def show_shards(found: list[dict]) -> None:
    table = Table(
        "split", "ranks", "ms", "ideal ms", "efficiency", "sent MiB", "messages", "GiB", ""
    )
    for row in found:
        if "failure" in row:
            table.add_row(_shown(row["axes"]), str(row["ranks"]), *[""] * 6, row["failure"])
            continue
        table.add_row(
            _shown(row["axes"]), str(row["ranks"]), f"{row['ms']:.2f}", f"{row['ideal_ms']:.2f}",
            f"{row['efficiency']:.0%}", f"{row['traffic']['sent'] / 2**20:.1f}",
            str(row["traffic"]["messages"]), f"{row['peak_gib'] or 0:.2f}", row["setting"],
        )  # fmt: skip
    Console(width=140).print(table)


def _shown(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {num}" for axis, num in axes.items()) or "none"


SECTIONS = ("exchange", "shards", "faces")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--folder", type=Path, help="for traces, pictures and report.json")
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
        measures: dict[str, Callable[[], list]] = {
            "exchange": lambda: measure_exchanges(options, folder),
            "shards": lambda: measure_shards(options),
            "faces": lambda: measure_faces(options),
        }
        shows = {
            "exchange": show_exchanges,
            "shards": show_shards,
            "faces": partial(print_rows, "boxes of 16x256^3"),
        }
        for section in options.only:
            found = measures[section]()
            if not options.json:
                shows[section](found)
            report[section] = [asdict(row) if isinstance(row, Row) else row for row in found]
            print(f"{section}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            (folder / "report.json").write_text(json.dumps(report, indent=1))
    if options.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
