"""How many plausible mistakes in the source do the tests notice?

    python benchmarks/mutants.py                       # all, about 20 minutes on 2 cores
    python benchmarks/mutants.py --only nn/ops       # those whose file or words hold this
    python benchmarks/mutants.py --list

Each mutant of ``benchmarks/mutation`` is one mistake. It is made in a copy of the checkout, in a
temporary folder, and the tests of its area that ``make test`` runs are run there: a mutant is
killed if one of them fails. Before that the same tests must pass without it. Exits with 1 if less
than 95% are killed.
"""

import collections
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from mutation import MUTANTS
from mutation.mutant import StaleError
from mutation.trial import TIMEOUT_SECONDS, judge, scratch_copy
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.95
BASE_TIMEOUT_SECONDS = 1800


def say(words):
    print(words, file=sys.stderr, flush=True)


def check_unmutated(copy, mutants, jobs):
    """Stops unless the tests of all areas pass as the source is."""
    by_package = collections.defaultdict(set)
    for mutant in mutants:
        by_package[mutant.package].update(mutant.test_paths)

    def run(package):
        tests = copy.run_tests(sorted(by_package[package]), BASE_TIMEOUT_SECONDS)
        say(f"{package}, unmutated: {'passes' if tests.passed else 'fails'}")
        return tests

    with ThreadPoolExecutor(jobs) as pool:
        failed = [tests for tests in pool.map(run, by_package) if not tests.passed]
    if failed:
        say(failed[0].output)
        raise SystemExit(f"without a mutant {failed[0].first_failure} fails: mend that first")


def judge_all(root, mutants, jobs, timeout_seconds):
    """The verdicts, in the order of ``mutants``; says each as it is known."""
    done = iter(range(1, len(mutants) + 1))

    def run(mutant):
        verdict = judge(mutant, root, timeout_seconds)
        how = f"killed by {verdict.by}" if verdict.killed else "SURVIVED"
        say(f"{next(done):3}/{len(mutants)} {verdict.seconds:5.1f} s  {mutant.name}: {how}")
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, mutants))


def make_table(verdicts):
    table = Table("package", "killed", "survived", "not noticed", box=box.SIMPLE)
    for package in dict.fromkeys(verdict.mutant.package for verdict in verdicts):
        ours = [verdict for verdict in verdicts if verdict.mutant.package == package]
        names = [verdict.mutant.name for verdict in ours if not verdict.killed]
        table.add_row(package, str(len(ours) - len(names)), str(len(names)), "\n".join(names))
    return table


def as_row(verdict):
    return {
        "mutant": verdict.mutant.name,
        "package": verdict.mutant.package,
        "tests": verdict.mutant.test_paths,
        "killed": verdict.killed,
        "by": verdict.by,
        "seconds": round(verdict.seconds, 1),
    }


def list_mutants(mutants, as_json):
    if as_json:
        print(json.dumps([{"mutant": each.name, "tests": each.test_paths} for each in mutants]))
    else:
        print(*(mutant.name for mutant in mutants), sep="\n")


@click.command(help=__doc__)
@click.option("--only", default="", help="Mutants whose file or words hold this text.")
@click.option("--jobs", default=os.cpu_count(), show_default=True, help="Runs at the same time.")
@click.option("--timeout", default=TIMEOUT_SECONDS, show_default=True, help="Seconds a mutant.")
@click.option("--list", "only_list", is_flag=True, help="Print the mutants and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def main(only, jobs, timeout, only_list, as_json):
    mutants = [mutant for mutant in MUTANTS if only in mutant.name]
    if not mutants:
        raise click.BadParameter(f"no mutant holds {only!r}", param_hint="--only")
    try:
        for mutant in mutants:
            mutant.mutated(ROOT)
    except StaleError as error:
        raise click.ClickException(str(error)) from None
    if only_list:
        return list_mutants(mutants, as_json)
    with scratch_copy(ROOT) as copy:
        copy.check()
        check_unmutated(copy, mutants, jobs)
        verdicts = judge_all(copy.root, mutants, jobs, timeout)
    score = sum(verdict.killed for verdict in verdicts) / len(verdicts)
    if as_json:
        print(json.dumps({"score": score, "mutants": [as_row(each) for each in verdicts]}))
    else:
        Console(width=160).print(make_table(verdicts))
        print(f"{score:.0%} of {len(verdicts)} mutants killed; the bar is {BAR:.0%}")
    raise SystemExit(0 if score >= BAR else 1)


if __name__ == "__main__":
    main()
