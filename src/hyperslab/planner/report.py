"""What was found, in words, as tables and as JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hyperslab.pages import shown_rate, shown_seconds, shown_share
from hyperslab.partial import shown_nbytes
from hyperslab.planner.cost import LayerCost
from hyperslab.planner.scaling import Run, fewest_gpus, largest_batch
from hyperslab.planner.search import Candidate, Found

MOST_ROWS = 8
MOST_INFEASIBLE = 3
LEAST_SHARE = 0.01
"""Of a step: what takes less is not told."""
MOST_PARTS = 3
WIDTH = 120


def sentence(found: Found) -> str:
    """The answer."""
    job, what = found.job, f"{found.gpus} x {found.machine.gpu}"
    step = f"{samples(job.batch)} a step"
    if not found.candidates:
        return f"No partition of {job.network.name}, {step}, fits on {what}: {_why(found)}"
    best, room = found.best, found.machine.memory_nbytes
    return (
        f"{job.network.name}, {step}, trains fastest on {what} with {best}: "
        f"{shown_seconds(best.step_seconds)} a step, "
        f"{shown_rate(best.samples_per_second)} samples/s, "
        f"{shown_share(found.efficiency(best))} of ideal speed, "
        f"{shown_nbytes(best.memory_nbytes)} of {shown_nbytes(room)} on each"
    )


def _why(found: Found) -> str:
    """How much the nearest lacks, and what would do."""
    if not found.infeasible:
        return (
            "with so many ranks some would hold nothing of a sample; use fewer, or a larger batch"
        )
    nearest = found.infeasible[0]
    gpus = fewest_gpus(found.job, found.machine)
    batch = largest_batch(found.job, found.machine, found.gpus)
    ways = [f"{gpus} GPUs"] if gpus else []
    ways += [f"a batch of {batch}"] if batch else []
    advice = f"; {' or '.join(ways)} would do" if ways else "; neither would more GPUs do"
    even = ", even if all that can be is computed twice" if nearest.recomputed else ""
    return f"the nearest, {nearest.cut}, {nearest.why_not} on each{even}{advice}"


def usage(found: Found) -> list[str]:
    """How the best is had, as lines of Python, and a setting where that is all there is."""
    best = found.best
    axes = ", ".join(f"{axis}={size}" for axis, size in best.mesh.items())
    lines = [f"mesh = hs.init({axes})"]
    if best.plan:
        entries = [f"    {name!r}: {dict(cut)}," for name, cut in best.plan.items()]
        lines += ["model = hs.parallelize(net, mesh, plan={", *entries, "})"]
    if best.depth_first:
        lines.append(f"model = hs.parallelize(net, mesh, depth_first={[*best.depth_first]})")
    if best.checkpointed:
        names = ", ".join(f'"{name}"' for name in best.checkpointed)
        lines.append(f"hyperslab train --set 'train.checkpoint_activations=[{names}]'")
    return lines


def run_sentence(run: Run, num_samples: int, epochs: int) -> str:
    return (
        f"{epochs:,} epochs of {num_samples:,} samples: {run.steps:,} steps, "
        f"{run.hours:,.3g} hours, {run.gpu_hours:,.4g} GPU-hours"
    )


# Numbers


def samples(num: int) -> str:
    return f"{num} sample{'s' * (num > 1)}"


def shown_parts(candidate: Candidate) -> str:
    """Where the time goes, the most first."""
    shares = [pair for pair in shares_of(candidate).items() if pair[1] >= LEAST_SHARE]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares[:MOST_PARTS])


def shares_of(candidate: Candidate) -> dict[str, float]:
    """The parts of a step, the largest first."""
    parts = candidate.cost.parts
    total = sum(parts.values()) or 1.0
    return dict(sorted(((name, each / total) for name, each in parts.items()), key=lambda p: -p[1]))


# Tables


def rows_of(found: Found, most: int) -> list[tuple[Candidate, int]]:
    """The best, and how many there are like each: those that only cut other dims as often."""
    rows: dict[object, list[Candidate]] = {}
    for each in found.candidates:
        sample, channel, *space = each.cut.sizes
        key = sample, channel, tuple(sorted(space)), f"{each.step_seconds:.2g}", str(each.plan)
        rows.setdefault(key, []).append(each)
    return [(alike[0], len(alike) - 1) for alike in rows.values()][:most]


def to_table(found: Found, most: int = MOST_ROWS) -> Table:
    """The best meshes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mesh", overflow="fold")
    for name in ("step", "samples/s", "of ideal", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where the time goes", overflow="fold")
    for candidate, alike in rows_of(found, most):
        more = f" (+{alike} alike)" if alike else ""
        table.add_row(
            Text.assemble(str(candidate), (more, "dim")),
            shown_seconds(candidate.step_seconds),
            shown_rate(candidate.samples_per_second),
            shown_share(found.efficiency(candidate)),
            shown_nbytes(candidate.memory_nbytes),
            shown_parts(candidate),
        )
    for candidate in found.infeasible[:MOST_INFEASIBLE]:
        memory = shown_nbytes(candidate.memory_nbytes)
        why = Text(candidate.why_not, style="yellow")
        table.add_row(Text(str(candidate)), "-", "-", "-", memory, why)
    return table


LAYER_COLUMNS = ("module", "operator", "cut", "forward", "backward", "exchange", "waits", "sums")


def layer_row(layer: LayerCost) -> tuple[str, ...]:
    times = (layer.forward, layer.backward, layer.exchange, layer.exposed, layer.reductions)
    return layer.module, layer.op, layer.cut, *(shown_seconds(t) if t else "-" for t in times)


def to_layer_table(candidate: Candidate) -> Table:
    """Every layer of a step."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(LAYER_COLUMNS):
        table.add_column(name, justify="right" if number > 2 else "left", no_wrap=number != 2)
    for layer in candidate.cost.layers:
        table.add_row(*map(Text, layer_row(layer)))
    return table


def to_parts(found: Found, most: int = MOST_ROWS, *, layers: bool = False) -> list[RenderableType]:
    """All that is printed."""
    parts: list[RenderableType] = [Text(sentence(found)), Text(), to_table(found, most)]
    if found.candidates:
        parts += [Text(), *(Text(f"  {line}") for line in usage(found))]
        if layers:
            parts += [Text(), to_layer_table(found.best)]
    if warning := rule_warning(found):
        parts += [Text(), Text(warning)]
    return parts


def rule_warning(found: Found) -> str:
    """That functions have no rule, if that matters."""
    names = found.job.network.without_rule
    if not names or found.gpus == 1:
        return ""
    return (
        f"There is no rule for {', '.join(names)}, which stops where a mesh splits what comes "
        "there: call hyperslab.gather before it, or register a rule"
    )


def to_text(found: Found) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    for part in to_parts(found):
        console.print(part, soft_wrap=isinstance(part, Text))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


# For programs


def to_dict(found: Found, most: int = MOST_ROWS) -> dict[str, Any]:
    job, machine = found.job, found.machine
    candidates = [_candidate(found, each) for each in found.candidates[:most]]
    return {
        "answer": sentence(found),
        "network": job.network.name,
        "input_shape": list(job.network.input_shape),
        "machine": machine.name,
        "gpu": machine.gpu,
        "gpus": found.gpus,
        "batch": job.batch,
        "precision": job.precision,
        "optimizer": job.optimizer,
        "source": job.source,
        "single_step_seconds": found.single.seconds,
        "without_rule": list(job.network.without_rule),
        "best": candidates[0] if candidates else None,
        "candidates": candidates,
        "infeasible": [
            {"mesh": each.mesh, "memory_bytes": each.memory_nbytes, "why": each.why_not}
            for each in found.infeasible[:most]
        ],
    }


def _candidate(found: Found, candidate: Candidate) -> dict[str, Any]:
    memory = candidate.memory
    return {
        "mesh": candidate.mesh,
        "plan": {name: dict(cut) for name, cut in candidate.plan.items()},
        "depth_first": list(candidate.depth_first),
        "checkpointed": list(candidate.checkpointed),
        "step_seconds": candidate.step_seconds,
        "samples_per_second": candidate.samples_per_second,
        "efficiency": found.efficiency(candidate),
        "seconds": candidate.cost.parts,
        "memory_bytes": candidate.memory_nbytes,
        "memory": {name: getattr(memory, name) for name in type(memory).__slots__},
        "layers": _layers(candidate.cost.layers),
    }


def _layers(layers: Sequence[LayerCost]) -> list[dict[str, Any]]:
    return [
        {
            "module": each.module,
            "operator": each.op,
            "cut": each.cut,
            "forward_seconds": each.forward,
            "backward_seconds": each.backward,
            "exchange_seconds": each.exchange,
            "exposed_seconds": each.exposed,
            "reduction_seconds": each.reductions,
            "exchange_bytes": each.nbytes,
        }
        for each in layers
    ]
