"""Does a split step cost a rank its share?

    python benchmarks/gpu_split.py --json > split.json          (one GPU, under 400 s)
    python benchmarks/gpu_split.py --only cosmoflow-256 exchange
    python benchmarks/gpu_split.py --small        (tiny, also without a GPU)

Ranks that share one GPU under MPS do the same work together as one rank does, so that N ranks
would ideally take as long as one: `x` is their time in units of that of one rank with CUDA graphs.
A step is forward and backward in bf16, channels_last, without dropout, with weight gradients
averaged. `ms` is the time of a step where one follows the other; `host ms` how long the host needs
to launch one that follows others, without waiting for the GPU; `first` the same after a pause, when
the host comes out of its sleep. Of steps with and without CUDA graphs, the faster one is held
against the bar. Backward passes run in the calling thread, as in `hyperslab train`.

`off` is the norm of the difference between the gradients and those of one rank, relative to the
latter's. `rounding` is how far one rank's are off those of a step in float32: what is off by more
than twice as much is wrong.

`kernels`: what one rank in the middle of a mesh computes, of CosmoFlow 4x512^3 (gpu_halo.py tells
how); of all ways to split among so many ranks, the best. `exchange`: one with the neighbour, 1 MiB
each way, in a CUDA graph (gpu_exchange.py tells how).

What fails is told in its row, and the others go on.
"""

import argparse
import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bars import Bar
from gpu.cases import Case, cosmoflow, mesh_tangling, unet
from gpu.mps import mps
from gpu.record import NO_TIME, Found, Record, about_this_run
from gpu.shards import measure_shards
from gpu.split_step import rounding_of, slowest, step_on_rank
from gpu_exchange import exchange_on_rank
from rich.console import Console
from rich.table import Table

from hyperslab.testing import RankError, Team

TEAM_SECONDS = 100.0
"""How long ranks may take for one row, kernels compiled."""
ABOUT = 1.05
"""Times that differ by less are about the same."""
MOST_OFF = 2.0
"""Of gradients, in units of what rounding does to those of one rank."""
KERNEL_SECONDS = 110.0
"""Of the budget, kept for one rank's kernels."""
EXCHANGED_NBYTES = 1 << 20
COLUMNS = (
    "network", "ranks", "graphs", "ms", "x", "host ms", "first", "off", "rounding", "GiB",
    "messages by", "",
)  # fmt: skip


class Limit(NamedTuple):
    sign: str
    bar: float
    stretch: float | None = None


class Network(NamedTuple):
    title: str
    case: Case
    axis: str
    bars: dict[int, Limit]
    """By number of ranks."""


def make_networks(*, small: bool) -> dict[str, Network]:
    """What matters most first: time may run out."""
    tiny: dict[str, Any] = {"precision": "fp32", "width": 2} if small else {}
    at_most = partial(Limit, "<=")
    return {
        "cosmoflow-512": Network(
            "CosmoFlow 4x512^3",
            cosmoflow(32 if small else 512, **tiny),
            "depth",
            {2: at_most(1.25, 1.1), 4: at_most(1.5, 1.25)},
        ),
        "cosmoflow-256": Network(
            "CosmoFlow 4x256^3",
            cosmoflow(16 if small else 256, **tiny),
            "depth",
            {2: at_most(1.7, 1.4), 4: at_most(2.4, 1.8)},
        ),
        "mesh-2k": Network(
            "mesh-tangling 18x2048^2",
            mesh_tangling(128 if small else 2048, **tiny),
            "height",
            {2: at_most(1.3), 4: at_most(1.6)},
        ),
        "unet-256": Network(
            "3-D U-Net 1x256^3",
            unet(32 if small else 256, **tiny),
            "depth",
            {2: at_most(1.15), 4: at_most(1.3)},
        ),
    }


HOST_MS = Limit("<=", 3.0, 1.5)
EXCHANGE_US = Limit("<=", 30.0, 15.0)
EFFICIENCY = {2: 0.92, 4: 0.82, 8: 0.68, 16: 0.52, 64: 0.25}
SECTIONS = (*make_networks(small=True), "exchange", "kernels")


def measure_network(
    name: str, network: Network, record: Record, folder: Path, options: argparse.Namespace
) -> None:
    """Rows of one rank and of several, with CUDA graphs and without."""
    kept = str(folder / f"{name}.pt")
    single = _measure_single(name, network, record, kept, options)
    for num_ranks in (2,) if options.small else network.bars:
        with Team(num_ranks, timeout_seconds=TEAM_SECONDS) as team:
            for graphs in (True, False):
                row = {"section": name, "network": network.title, "ranks": num_ranks}
                row |= {"graphs": graphs}
                axes = {network.axis: num_ranks}
                call = (network.case, axes, options.transport, graphs, options.repeats)
                found = _attempt(record, team, *call, kept if "ms" in single else None)
                if "ms" in found and "ms" in single:
                    found |= {"times": found["ms"] / single["ms"], "rounding": single["rounding"]}
                record.add(row | found)


def _measure_single(
    name: str, network: Network, record: Record, kept: str, options: argparse.Namespace
) -> Found:
    """One rank, with CUDA graphs: what all others are compared with."""
    row = {"section": name, "network": network.title, "ranks": 1, "graphs": True}
    with Team(1, timeout_seconds=TEAM_SECONDS) as team:
        call = (network.case, {network.axis: 1}, "auto", True, options.repeats)
        found = _attempt(record, team, *call, None, kept)
        if "ms" in found:
            try:
                (found["rounding"],) = team.run(rounding_of, network.case, kept)
            except RankError as error:
                found |= {"rounding": None, "notes": [f"no precise step: {_first_line(error)}"]}
    record.add(row | found)
    return found


def _attempt(record: Record, team: Team, *call: Any) -> Found:
    """The figures of a step, or why there are none."""
    if record.is_over:
        return {"failure": NO_TIME}
    try:
        return slowest(team.run(step_on_rank, *call))
    except RankError as error:
        return {"failure": _first_line(error)}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def measure_exchange(options: argparse.Namespace) -> Found:
    nbytes = 1 << 10 if options.small else EXCHANGED_NBYTES
    try:
        with Team(2, timeout_seconds=TEAM_SECONDS) as team:
            ranks = team.run(exchange_on_rank, 2, options.transport, [nbytes], options.repeats * 6)
    except RankError as error:
        return {"failure": _first_line(error)}
    return ranks[0][0]


def measure_kernels(options: argparse.Namespace, record: Record) -> list[Found]:
    """One row for each number of ranks: the best split of it."""
    wanted = (1, 2) if options.small else (1, *EFFICIENCY)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    title = "CosmoFlow 1 x 4x32^3" if options.small else "CosmoFlow 1 x 4x512^3"

    def is_wanted(network: Any, axes: dict[str, int]) -> bool:
        num_ranks = torch.Size(axes.values()).numel()
        is_outermost = not axes or "depth" in axes
        return f"{network.name} {network.case}" == title and num_ranks in wanted and is_outermost

    measure_shards(device, record, small=options.small, wanted=is_wanted)
    best: dict[int, Found] = {}
    for row in record.rows:
        known = best.get(row["ranks"])
        if known is None or row.get("efficiency", 0) > known.get("efficiency", 0):
            best[row["ranks"]] = row
    return list(best.values())


def cells(row: Found) -> list[str]:
    names = [row["network"], str(row["ranks"]), "yes" if row["graphs"] else "no"]
    if "failure" in row:
        return [*names, *[""] * (len(COLUMNS) - 4), row["failure"]]
    numbers = [
        "" if row.get(name) is None else f"{row[name]:{form}}"
        for name, form in (
            ("ms", ".2f"), ("times", ".2f"), ("host_ms", ".2f"), ("first_host_ms", ".2f"),
            ("off", ".1e"), ("rounding", ".1e"), ("peak_gib", ".1f"),
        )
    ]  # fmt: skip
    return [*names, *numbers, row["messages_by"], "; ".join(row["notes"])]


def kernel_cells(row: Found) -> list[str]:
    figures = [f"{row['ms']:.2f} ms", f"{row['efficiency']:.0%}"] if "ms" in row else []
    split = " x ".join(f"{axis} {num}" for axis, num in row["axes"].items())
    return [str(row["ranks"]), split, *figures, row.get("failure", "")]


class Verdict(NamedTuple):
    bar: Bar
    stretch: float | None
    why: str
    """Why nothing was measured, or what else is to be known."""

    @property
    def is_measured(self) -> bool:
        return not math.isnan(self.bar.measured)

    def to_json(self) -> Found:
        measured = self.bar.measured if self.is_measured else None
        more = {"measured": measured, "met": self.bar.is_met, "stretch": self.stretch}
        return self.bar._asdict() | more | {"why": self.why}

    @property
    def word(self) -> str:
        if not self.is_measured:
            return "[red]NOT MEASURED[/red]"
        if not self.bar.is_met:
            return "[red]MISSED[/red]"
        reached = self.stretch is not None and self.bar._replace(bar=self.stretch).is_met
        return "met, stretch too" if reached else "met"


def verdicts(report: Found) -> list[Verdict]:
    """The bars of what was asked for, in the order of the issue's table."""
    found = []
    networks = make_networks(small=False)
    chosen = [row for row in map(partial(_faster, report), _split_keys(report)) if row]
    for row in chosen:
        network = networks[row["section"]]
        what = f"{network.title}, {row['ranks']} ranks against 1"
        found.append(_verdict(what, row.get("times"), network.bars[row["ranks"]], _why(row)))
    timed = [row for row in chosen if "host_ms" in row]
    if chosen:
        for what, name in (("", "host_ms"), (" after a pause", "first_host_ms")):
            host = max((row[name] for row in timed), default=None)
            found.append(_verdict(f"host of any split step{what}, ms", host, HOST_MS, ""))
        off = [
            row["off"] / row["rounding"]
            for row in report["steps"]
            if row.get("off") is not None and row.get("rounding")
        ]
        limit = Limit("<=", MOST_OFF)
        what = "gradients of any split step off one rank's, of rounding"
        found.append(_verdict(what, max(off, default=None), limit, ""))
    for row in report.get("kernels", []):
        if row["ranks"] in EFFICIENCY:
            limit = Limit(">=", EFFICIENCY[row["ranks"]])
            what = f"kernels of one of {row['ranks']} ranks, efficiency"
            found.append(_verdict(what, row.get("efficiency"), limit, row.get("failure", "")))
    if "exchange" in report:
        row = report["exchange"]
        what = "exchange of 1 MiB in a graph, us"
        found.append(_verdict(what, row.get("graph_us"), EXCHANGE_US, row.get("failure", "")))
    return found


def _split_keys(report: Found) -> list[tuple[str, int]]:
    return list(
        dict.fromkeys((r["section"], r["ranks"]) for r in report["steps"] if r["ranks"] > 1)
    )


def _faster(report: Found, key: tuple[str, int]) -> Found:
    """Of a step with graphs and without, the faster one, or one that failed.

    That with graphs if they are about as fast: it asks less of the host.
    """
    rows = [row for row in report["steps"] if (row["section"], row["ranks"]) == key]
    return min(
        rows, key=lambda row: row.get("times", float("inf")) * (1 if row["graphs"] else ABOUT)
    )


def _why(row: Found) -> str:
    graphs = "" if row["graphs"] else "without CUDA graphs"
    return row.get("failure") or graphs


def _verdict(what: str, measured: float | None, limit: Limit, why: str) -> Verdict:
    number = float("nan") if measured is None else measured
    return Verdict(Bar("gpu_split", what, number, limit.sign, limit.bar), limit.stretch, why)


def table_of(found: list[Verdict]) -> Table:
    table = Table("what", "measured", "bar", "stretch", "", "", title="Split steps on one GPU")
    for verdict in found:
        bar = verdict.bar
        stretch = "" if verdict.stretch is None else f"{bar.sign} {verdict.stretch:g}"
        limits = f"{bar.measured:.3g}", f"{bar.sign} {bar.bar:g}", stretch
        table.add_row(bar.what, *limits, verdict.word, verdict.why)
    return table


def measure(options: argparse.Namespace) -> Found:
    """Ranks share the GPU under MPS; one rank's kernels are traced without it."""
    budget = options.budget - KERNEL_SECONDS * ("kernels" in options.only)
    record = Record("steps", COLUMNS, cells, folder=options.folder, budget=budget)
    report: Found = {**about_this_run(), "small": options.small}
    networks = make_networks(small=options.small)
    with tempfile.TemporaryDirectory() as folder, mps(options.mps):
        if "exchange" in options.only:
            report["exchange"] = measure_exchange(options)
        for name in [name for name in networks if name in options.only]:
            measure_network(name, networks[name], record, Path(folder), options)
    report["steps"] = record.rows
    if "kernels" in options.only:
        columns = ("ranks", "split", "kernels", "efficiency", "")
        left = max(0.0, options.budget - record.seconds)
        kernels = Record("kernels", columns, kernel_cells, folder=options.folder, budget=left)
        report["kernels"] = measure_kernels(options, kernels)
    return report | {"seconds": round(record.seconds, 1)}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--budget", type=float, default=340, help="begin no row after as many s")
    parser.add_argument("--folder", type=Path, help="for results, renewed after every row")
    parser.add_argument("--small", action="store_true", help="tiny; so without a GPU")
    parser.add_argument("--no-mps", dest="mps", action="store_false", help="ranks take turns")
    parser.add_argument("--json", action="store_true", help="print JSON, and tables to stderr")
    options = parser.parse_args()
    options.small |= not torch.cuda.is_available()
    options.mps &= torch.cuda.is_available()
    options.transport = "device" if torch.cuda.is_available() else "auto"
    options.repeats = 2 if options.small else 10
    return options


def main() -> None:
    options = parse_options()
    report = measure(options)
    found = verdicts(report)
    Console(width=150, file=sys.stderr if options.json else None).print(table_of(found))
    if options.json:
        print(json.dumps(report | {"bars": [each.to_json() for each in found]}, indent=1))


if __name__ == "__main__":
    main()
