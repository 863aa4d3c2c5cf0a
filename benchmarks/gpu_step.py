"""How fast is a training step on one GPU, against plain PyTorch in the same run?

    python benchmarks/gpu_step.py
    python benchmarks/gpu_step.py --only 512 --quick
    python benchmarks/gpu_step.py --small        (tiny networks, also without a GPU)

A step is a forward pass, the loss and a backward pass, as in examples/train_cosmoflow.py but
without its optimizer, which is the same for both. `plain` is the network as it is, `ours` the
same one given to hs.parallelize and fed by hs.shard; bf16 is autocast. `plain` takes the faster of
contiguous and channels_last memory, `ours` is channels_last, and both take the faster of with and
without cudnn.benchmark (without, where a step takes over a second; one setting alone where it takes
over four). `graphs` is ours with cuda_graphs=True, measured where the GPU may wait for the host.
Times are medians between CUDA events, after a warm-up, on fresh random numbers; host times end
when all work is given to the GPU. Where steps are short, blocks of them take turns, so that a slow
moment of the host is slow for all sides, and sides are compared by the median of the ratios of
blocks in one round. `error` is the larger relative difference, of the loss and
of the gradient of the first weight in a step without dropout, from plain PyTorch in float32.
Rounding changes signs before activations: in bf16 gradients are some percent off, and where ours
are more than twice as far off as those of plain PyTorch, that is called wrong.

The floor is the longer of two times: the FLOPs of convolutions and dense layers (forward x 3) at
the rate of a large matrix product, and the bytes moved at the rate of a large copy, both measured
in the same run. Bytes are counted twice: `unfused`, every operator reading and writing its tensors,
and `fused`, where a convolution and the activation and pool after it are one pass, forward and
backward.

Ends with status 1 where a step was wrong, and with --small where one failed.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from gpu.apart import run_apart
from gpu.cases import Case, make_cases, make_small_cases
from gpu.clock import Ceilings, measure_ceilings
from gpu.traffic import Work, count_step
from gpu.trial import SETTINGS, Measured, measure, measure_in_turns, measure_plain
from rich.console import Console
from rich.table import Table

from hyperslab.kernels import fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_TIME = "not measured: no time left (--budget)"
APART_NUMEL = 2**31
"""Plain PyTorch has kernels that crash on larger tensors, and with them all that follows."""
APART_SECONDS = 90.0
TIMES_PLAIN_ERROR = 2.0
"""How much further than plain PyTorch's a step may be from one in float32; more is a mistake."""
LEAST_ERROR = 1e-3
"""What is no mistake where plain PyTorch has none."""


@dataclass
class Result:
    """What was found about a case."""

    case: Case
    work: Work
    plain: Measured | str
    """The figures, or why there are none."""
    ours: Measured | str
    graphs: Measured | str | None = None
    """With CUDA graphs; None where that is not asked for."""

    @property
    def errors(self) -> list[float] | None:
        """Of plain PyTorch, of ours, and with CUDA graphs if they were measured."""
        if isinstance(self.plain, str) or isinstance(self.ours, str) or self.plain.exact is None:
            return None
        sides = [
            self.plain,
            self.ours,
            *([self.graphs] if isinstance(self.graphs, Measured) else []),
        ]
        return [side.evidence.error(self.plain.exact) for side in sides]

    @property
    def is_right(self) -> bool:
        """Unless it was shown to be wrong."""
        if self.errors is None:
            return True
        plain, *ours = self.errors
        return all(error <= max(TIMES_PLAIN_ERROR * plain, LEAST_ERROR) for error in ours)


Results = dict[str, Result]
CHANNELS_LAST = [setting for setting in SETTINGS if setting.channels_last]
"""What is tried of ours."""
WITH_GRAPHS = {"cuda_graphs": True}


def times_faster(name: str, results: Results) -> float:
    return results[name].plain.ms / results[name].ours.ms


def times_plain(name: str, results: Results) -> float:
    return results[name].ours.times(results[name].plain)


def times_plain_host(name: str, results: Results) -> float:
    return results[name].ours.times(results[name].plain, host=True)


def times_half_the_size(name: str, results: Results) -> float:
    return results[name].ours.ms / results["512-bf16"].ours.ms


def peak_memory(name: str, results: Results) -> float:
    return results[name].ours.peak_gib


@dataclass(frozen=True)
class Row:
    """A number to reach."""

    what: str
    case: str
    unit: str
    value: Callable[[str, Results], float]
    bar: float
    stretch: float | None = None
    at_least: bool = False

    def of(self, results: Results) -> float | None:
        """The number, where all it needs was measured."""
        try:
            return self.value(self.case, results)
        except (AttributeError, KeyError, TypeError):
            return None

    def meets(self, goal: float | None, results: Results) -> bool | None:
        """None where there is nothing to judge."""
        result, value = results[self.case], self.of(results)
        if goal is None or result.ours == NO_TIME:
            return None
        if isinstance(result.ours, str) or not result.is_right:
            return False
        if value is None:
            return None
        return value >= goal if self.at_least else value <= goal

    def goal(self, goal: float | None) -> str:
        return "" if goal is None else f"{'>=' if self.at_least else '<='} {goal:g} {self.unit}"


ROWS = [
    Row("CosmoFlow bf16", "512-bf16", "x faster", times_faster, 33, 77, at_least=True),
    Row("CosmoFlow TF32", "512-tf32", "x faster", times_faster, 5, at_least=True),
    Row("its peak memory", "512-bf16", "GiB", peak_memory, 13, 8),
    Row("the same depth first", "512-lean", "GiB", peak_memory, 13, 8),
    Row("CosmoFlow bf16", "1024-bf16", "x 512^3", times_half_the_size, 8.5),
    Row("CosmoFlow bf16", "128x8", "x plain", times_plain, 1.0, 0.6),
    Row("CosmoFlow bf16", "256", "x plain", times_plain, 1.0, 0.6),
    Row("mesh-tangling 2K", "mesh-2k", "x plain", times_plain, 1.02),
    Row("ResNet-50", "resnet-50", "x plain", times_plain, 1.02),
    Row("3-D U-Net", "unet-256", "x plain", times_plain, 1.02),
    Row("torchvision's r3d_18", "r3d_18", "x plain", times_plain, 1.02),
    Row("torchvision's mc3_18", "mc3_18", "x plain", times_plain, 1.02),
    Row("host time of a step", "host-32x8", "x plain", times_plain_host, 1.1),
]


def run_cases(cases: dict[str, Case], options: argparse.Namespace) -> Results:
    results: Results = {}
    plains: dict[object, Measured | str] = {}
    begun = time.perf_counter()
    seconds = 0.0 if options.small else 0.2 if options.quick else 0.6

    def told(name: str, side: Measured | str) -> Measured | str:
        log = f"{time.perf_counter() - begun:6.1f} s  {name}: {_brief(side)}"
        print(log, file=sys.stderr, flush=True)
        return side

    for name, case in cases.items():
        work = _work_of(case)
        plain = ours = NO_TIME
        graphs = NO_TIME if case.graphs else None
        if time.perf_counter() - begun < options.budget:
            ours = measure(case, DEVICE, case.choices, seconds, CHANNELS_LAST)
            told(f"{name}, ours", ours)
            if case.plain_key not in plains:
                plain = _measure_plain(case, work, seconds)
                plains[case.plain_key] = told(f"{name}, plain", plain)
            plain = plains[case.plain_key]
            if case.graphs:
                graphs = measure(case, DEVICE, [WITH_GRAPHS], seconds, CHANNELS_LAST)
                told(f"{name}, with graphs", graphs)
            sides = [side for side in (plain, ours, graphs) if isinstance(side, Measured)]
            if len(sides) == (3 if case.graphs else 2) and work.largest_numel <= APART_NUMEL:
                plain, ours, *rest = measure_in_turns(case, DEVICE, sides, seconds)
                graphs = rest[0] if rest else None
                told(f"{name} in turns", ours)
        results[name] = Result(case, work, plain, ours, graphs)
    return results


def _measure_plain(case: Case, work: Work, seconds: float) -> Measured | str:
    if work.largest_numel <= APART_NUMEL:
        return measure_plain(case, DEVICE, seconds, SETTINGS)
    failures = []
    for settings in (SETTINGS, SETTINGS[1:2]):  # a crash leaves the second one untried
        args = case, DEVICE, seconds, settings
        side = run_apart(measure_plain, *args, timeout_seconds=APART_SECONDS)
        if isinstance(side, Measured):
            return side
        failures.append(side)
    return "; ".join(dict.fromkeys(failures))


def _work_of(case: Case) -> Work:
    def loss_of(output: torch.Tensor) -> torch.Tensor:
        target = case.make_target("meta")
        return case.loss(output, target if case.classes else target.to(output.dtype))

    return count_step(case.make, case.shape, loss_of, case.dtype)


def _brief(side: Measured | str) -> str:
    return side if isinstance(side, str) else f"{side.ms:.4g} ms, {side.words}"


def report_of(results: Results, ceilings: Ceilings, *, small: bool) -> dict:
    rows = [row for row in ROWS if row.case in results]
    return {
        "device": _device_name(),
        "torch": torch.__version__,
        "small": small,
        "ceilings": asdict(ceilings),
        "rows": [_row_report(row, results, ceilings, judged=not small) for row in rows],
    }


def _row_report(row: Row, results: Results, ceilings: Ceilings, *, judged: bool) -> dict:
    result = results[row.case]
    work, precision = result.work, result.case.precision.replace("fp32", "tf32")
    floors = {
        kind: ceilings.floor_ms(work.flops, nbytes, precision)
        for kind, nbytes in (("unfused", work.nbytes), ("fused", work.fused_nbytes))
    }
    ours = None if isinstance(result.ours, str) else result.ours.ms
    return {
        "what": row.what,
        "batch": str(result.case),
        "value": row.of(results),
        "unit": row.unit,
        "bar": row.goal(row.bar),
        "met": row.meets(row.bar, results) if judged else None,
        "stretch": row.goal(row.stretch),
        "stretch_met": row.meets(row.stretch, results) if judged else None,
        "plain": _side_report(result.plain),
        "ours": _side_report(result.ours),
        "graphs": None if result.graphs is None else _side_report(result.graphs),
        "errors": result.errors,
        "is_right": result.is_right,
        "work": asdict(work),
        "floor_ms": floors,
        "times_floor": {kind: ours and ours / floor for kind, floor in floors.items()},
    }


def _side_report(side: Measured | str) -> dict:
    if isinstance(side, str):
        return {"failure": side}
    names = "ms", "host_ms", "spread", "peak_gib"
    return {name: getattr(side, name) for name in names} | {"setting": side.words}


def _device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine()


def bars(report: dict) -> list[tuple[str, float, str, float]]:
    """What is measured, its value, how it must compare and with what; rows without time not."""
    found = []
    for row in report["rows"]:
        if row["met"] is not None:
            sign, bar, _ = row["bar"].split(maxsplit=2)
            value = row["value"] if row["is_right"] and row["value"] is not None else float("nan")
            found.append((f"{row['what']}, {row['batch']}, {row['unit']}", value, sign, float(bar)))
    return found


BOTH = "unfused / fused"
COLUMNS = (
    "step", "plain ms", "ours ms", "graphs ms", "is", "bar", "met", "stretch", "met", "GiB plain",
    "GiB ours", "TFLOP", f"GiB moved\n{BOTH}", f"floor ms\n{BOTH}", f"ours / floor\n{BOTH}",
    "error\nplain / ours\n/ graphs",
)  # fmt: skip


def print_table(report: dict) -> None:
    rates = report["ceilings"]["flops_per_second"]
    title = (
        f"{report['device']}, torch {report['torch']}: copies at "
        f"{report['ceilings']['bytes_per_second'] / 1e12:.2f} TB/s, products at "
        + ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {name}" for name, rate in rates.items())
    )
    table = Table(*COLUMNS, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report["rows"]:
        table.add_row(*_cells(row))
    console = Console(width=200)
    console.print(table)
    for row in report["rows"]:
        for side in ("plain", "ours", "graphs"):
            if row[side] is not None:
                about = row[side].get("failure") or row[side]["setting"]
                console.print(f"{row['what']} {row['batch']}, {side}: {about}", highlight=False)


def _cells(row: dict) -> list[str]:
    host = "host" in row["what"]
    sides = [row[side] for side in ("plain", "ours", "graphs") if row[side] is not None]
    ms = [_number(side.get("host_ms" if host else "ms"), "failed") for side in sides]
    peaks = [_number(side.get("peak_gib")) for side in sides[:2]]
    moved = [row["work"][name] / 2**30 for name in ("nbytes", "fused_nbytes")]
    errors = row["errors"]
    error = "not compared" if errors is None else " / ".join(f"{e:.0e}" for e in errors)
    return [
        f"{row['what']}\n{row['batch']}",
        *ms,
        *[""] * (3 - len(ms)),
        "" if row["value"] is None else f"{row['value']:.3g} {row['unit']}",
        row["bar"],
        _mark(row["met"]),
        row["stretch"],
        _mark(row["stretch_met"]),
        *peaks,
        f"{row['work']['flops'] / 1e12:.3g}",
        _pair(moved),
        _pair(row["floor_ms"].values()),
        _pair(row["times_floor"].values()),
        error if row["is_right"] else f"{error} WRONG",
    ]


def _number(value: float | None, missing: str = "") -> str:
    return missing if value is None else f"{value:.4g}"


def _pair(values) -> str:
    return " / ".join("-" if value is None else f"{value:.3g}" for value in values)


def _mark(met: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[met]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ", ".join(make_cases())
    parser.add_argument("--only", nargs="+", default=[""], help=f"parts of names among {names}")
    parser.add_argument("--fused", action="store_true", help="use fused kernels on any GPU")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--small", action="store_true", help="tiny networks; so without a GPU")
    parser.add_argument("--budget", type=float, default=280.0, help="begin nothing after as many s")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    options.small |= not torch.cuda.is_available()
    return options


def main() -> None:
    options = parse_options()
    every = make_small_cases() if options.small else make_cases()
    cases = {name: every[name] for name in every if any(part in name for part in options.only)}
    if not cases:
        sys.exit(f"--only {' '.join(options.only)} fits none of {', '.join(every)}")
    if options.fused and DEVICE.type == "cuda":
        fused.FASTER_ON.add(torch.cuda.get_device_capability())
    ceilings = measure_ceilings(DEVICE)
    results = run_cases(cases, options)
    report = report_of(results, ceilings, small=options.small)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report)
    failed = any(isinstance(result.ours, str) for result in results.values())
    if (options.small and failed) or not all(result.is_right for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
