"""What each rank does: all trials of some operators, with a journal that outlives it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import hyperslab as hs
from hyperslab.testing.sweep.arguments import Sample
from hyperslab.testing.sweep.catalog import operators
from hyperslab.testing.sweep.findings import Trial
from hyperslab.testing.sweep.operators import Operator, Spelling, spread
from hyperslab.testing.sweep.placement import AXIS, Placement, placements
from hyperslab.testing.sweep.trial import Serial, judge

TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Effort:
    """How many trials are made of each operator."""

    samples: int = 10
    """Of the usual kind; there are a few more with integers, and with arguments that are wrong."""
    trials: int = 40
    """Of its first spelling; each other has a quarter of it."""
    call_seconds: float = 120
    """How long the ranks may take for some operators before they count as stuck."""


@dataclass(frozen=True)
class Task:
    """An operator, how many of its trials are done, and in how many of them ranks broke down."""

    operator: str
    done: int = 0
    breaks: int = 0


@dataclass(frozen=True)
class _Case:
    sample: Sample
    spelling: Spelling
    placement: Placement
    grads: bool


def names(modules: Sequence[str] = ()) -> list[str]:
    """The names of all operators; ``modules``, which register rules, are imported first."""
    for module in modules:
        import_module(module)
    return list(operators())


def sweep_on_rank(tasks: Sequence[Task], effort: Effort, folder: Path) -> None:
    """Makes the trials of ``tasks``. Each is in this rank's journal before and after it.

    Collective over two ranks.
    """
    mesh = _mesh()
    with warnings.catch_warnings(), journal_of(folder, mesh.rank).open("a", buffering=1) as journal:
        warnings.simplefilter("ignore")
        for task in tasks:
            _sweep_operator(task, effort, mesh, journal.write)


def journal_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


@cache
def _mesh() -> hs.Mesh:
    return hs.init(
        sample=1, **{AXIS: 2}, device="cpu", timeout_seconds=TIMEOUT_SECONDS, transport="auto"
    )


def _sweep_operator(
    task: Task, effort: Effort, mesh: hs.Mesh, write: Callable[[str], object]
) -> None:
    operator = operators()[task.operator]
    serials: dict[tuple[str, str, bool], Serial] = {}
    for number, case in enumerate(_cases(operator, effort)):
        if number < task.done:
            continue
        trial = Trial(
            operator.name, number, case.spelling.name, case.sample.label, str(case.placement),
            case.placement.kind, case.placement.main_dim, case.grads,
        )  # fmt: skip
        entry = asdict(trial)
        write(json.dumps(entry) + "\n")
        key = (case.sample.label, case.spelling.name, case.grads)
        if key not in serials:
            serials[key] = Serial(
                case.sample, case.spelling.function, case.grads, operator.compared
            )
        verdict = judge(serials[key], case.placement, mesh)
        write(json.dumps(entry | {"verdict": verdict.kind, "why": verdict.why}) + "\n")


def _cases(operator: Operator, effort: Effort) -> Iterator[_Case]:
    samples = [(s, p) for s in operator.samples_of(effort.samples) if (p := placements(s.tensors))]
    for spelling in operator.spellings:
        every = [
            _Case(sample, spelling, placement, grads)
            for sample, each in samples
            if spelling.takes(sample)
            for placement in each
            for grads in (True, False)
            if grads or placement is each[-1]
        ]
        first = spelling is operator.spellings[0]
        limit = effort.trials if first else max(4, effort.trials // 4)
        # The first tensor alone is what users split most, and what the page tells dim by dim.
        main = [case for case in every if case.placement.kind == "main"]
        others = [case for case in every if case.placement.kind != "main"]
        yield from spread(main, limit // 2, f"{operator.name} {spelling.name}")
        yield from spread(others, limit - limit // 2, f"{operator.name} {spelling.name}")
