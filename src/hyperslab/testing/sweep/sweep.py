"""The whole sweep: ranks that try, and new ones where those crash or hang."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.testing.rank_processes import RankError
from hyperslab.testing.sweep.arguments import AXIS, Placement, Sample, placements
from hyperslab.testing.sweep.findings import WRONG, Findings, Trial
from hyperslab.testing.sweep.operators import Operator, Spelling, operators, spread
from hyperslab.testing.sweep.trial import Serial, judge
from hyperslab.testing.team import Team

# What each rank does: all trials of some operators, with a journal that outlives it

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


NUM_RANKS = 2
OPERATORS_A_CALL = 12
MAX_BREAKS = 3
"""After so many crashes the rest of an operator's trials are left out: new ranks take seconds."""
ALL = -1
"""The number of a trial that stands for all of an operator."""
USUAL = Effort()
"""A minute or two on two cores."""


def sweep(
    operators: Sequence[str] | None = None,
    effort: Effort = USUAL,
    *,
    modules: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """The verdicts on all operators, or on ``operators``, from two ranks on this machine.

    ``modules`` are imported there first: they register the rules to try. A rank that crashes or
    hangs makes its trial wrong, and the sweep goes on with new ranks.
    """
    findings = Findings()
    with Team(NUM_RANKS, timeout_seconds=effort.call_seconds) as team:
        chosen = team.run(names, modules)[0]
        if operators is not None:
            unknown = sorted(set(operators) - set(chosen))
            if unknown:
                raise ConfigError(f"the sweep knows no operators of these names: {unknown}")
            chosen = [name for name in chosen if name in set(operators)]
        for start in range(0, len(chosen), OPERATORS_A_CALL):
            on_progress(start, len(chosen))
            group = chosen[start : start + OPERATORS_A_CALL]
            findings.trials += _sweep_group(team, [Task(name) for name in group], effort, modules)
        on_progress(len(chosen), len(chosen))
    return findings


def _sweep_group(
    team: Team, tasks: list[Task], effort: Effort, modules: Sequence[str]
) -> list[Trial]:
    done: list[Trial] = []
    while tasks:
        with TemporaryDirectory(prefix="hyperslab-sweep-") as folder:
            try:
                team.run(names, modules)
                team.run(sweep_on_rank, tasks, effort, Path(folder))
                return done + _merged(Path(folder))
            except RankError as error:
                trials = _merged(Path(folder))
                broken = replace(_broken(trials, tasks), verdict=WRONG, why=str(error).strip())
        done += [trial for trial in trials if trial.verdict] + [broken]
        tasks = _after(broken, tasks)
    return done


def _merged(folder: Path) -> list[Trial]:
    """The trials of both journals: wrong if either rank says so, unfinished if one has not done."""
    journals = [_read(journal_of(folder, rank)) for rank in range(NUM_RANKS)]
    worst_first = (WRONG, "")
    merged = []
    for key in journals[0] | journals[1]:
        each = [journal.get(key) for journal in journals]
        known = [trial for trial in each if trial]
        worst = next((t for v in worst_first for t in known if t.verdict == v), known[0])
        merged.append(worst if len(known) == NUM_RANKS else replace(worst, verdict=""))
    return merged


def _read(path: Path) -> dict[tuple[str, int], Trial]:
    lines = path.read_text().splitlines() if path.exists() else []
    trials = [Trial(**json.loads(line)) for line in lines]
    return {(trial.operator, trial.number): trial for trial in trials}


def _broken(trials: Sequence[Trial], tasks: Sequence[Task]) -> Trial:
    """The trial in which the ranks stopped, or, if that was between trials, all of an operator."""
    unfinished = [trial for trial in trials if not trial.verdict]
    if unfinished:
        return unfinished[0]
    tried = {trial.operator for trial in trials}
    ahead = [task for task in tasks if task.operator not in tried] or [tasks[-1]]
    return Trial(ahead[0].operator, ALL, "all", "all", "all", "all", None, True)


def _after(broken: Trial, tasks: list[Task]) -> list[Task]:
    """What is still to do."""
    place = [task.operator for task in tasks].index(broken.operator)
    breaks = tasks[place].breaks + 1
    if broken.number == ALL or breaks == MAX_BREAKS:
        return tasks[place + 1 :]
    rest = replace(tasks[place], done=broken.number + 1, breaks=breaks)
    return [rest, *tasks[place + 1 :]]
