"""The whole sweep: ranks that try, and new ones where those crash or hang."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hyperslab.errors import ConfigError
from hyperslab.testing.failure import RankError
from hyperslab.testing.sweep.findings import WRONG, Findings, Trial
from hyperslab.testing.sweep.ranks import Effort, Task, journal_of, names, sweep_on_rank
from hyperslab.testing.team import Team

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
