"""Looks for examples that fail: hypothesis tests, random networks and damaged files by new seeds.

    python benchmarks/fuzz.py --seconds 600                    # or: make fuzz ARGS="--seconds 600"
    python benchmarks/fuzz.py --seed 123 --only tests/io/formats/test_npy.py   # one part again

Each round draws a seed and goes through all parts in random order until the time is up. What fails
is printed with the command that repeats it, and ends in exit status 1: make it a fixed test
(``@example(...)`` for a hypothesis test), then mend it.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console

ROOT = Path(__file__).parents[1]
FORMATS = ("hdf5", "npy", "nifti", "tfrecord", "zarr")
NETWORKS = 20
FILES = 40


def parts():
    """What a round consists of, by name."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        *(str(path.relative_to(ROOT)) for path in tests if draws_examples(path)),
        "networks",
        *(f"{format} files" for format in FORMATS),
    ]


def draws_examples(path):
    text = path.read_text()
    return "hypothesis" in text or "ReaderContract" in text


def command_of(part, seed):
    if part == "networks":
        return ["benchmarks/stress.py", "--seed", str(seed), "--count", str(NETWORKS)]
    if part.endswith(" files"):
        format = part.removesuffix(" files")
        fuzz = ["benchmarks/damaged_files.py", "--format", format]
        return [*fuzz, "--seed", str(seed), "--count", str(FILES)]
    return [
        *("-m", "pytest", "-q", "-m", "hypothesis and not gpu"),
        *("-p", "no:cacheprovider", f"--hypothesis-seed={seed}", part),
    ]


def fails(part, seed):
    """What the part said if it failed; its tests may also all be left out, which is no failure."""
    done = subprocess.run(
        [sys.executable, *command_of(part, seed)],
        cwd=ROOT,
        env=os.environ | {"HYPERSLAB_EXAMPLES": "fuzz"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    no_tests = 5
    return done.stdout if done.returncode not in (0, no_tests) else None


@click.command(help=__doc__)
@click.option("--seconds", default=300.0, show_default=True, help="When no further part begins.")
@click.option("--seed", type=int, help="Of the first round; drawn if not given.")
@click.option("--only", multiple=True, help="A part; may be given several times. Then one round.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(seconds, seed, only, as_json):
    known = parts()
    if unknown := set(only) - set(known):
        raise click.UsageError(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    console, failed, count = Console(stderr=True), [], 0
    seed = random.randrange(2**31) if seed is None else seed
    until = time.monotonic() + seconds
    while True:
        for part in random.Random(seed).sample(known, len(known)):
            if only and part not in only:
                continue
            if time.monotonic() >= until:
                break
            with console.status(f"{count} parts were well, {len(failed)} failed; now {part}"):
                told = fails(part, seed)
            count += told is None
            if told is not None:
                again = f"python benchmarks/fuzz.py --seed {seed} --only '{part}'"
                failed.append({"part": part, "seed": seed, "again": again})
                console.print(told, highlight=False, markup=False)
                console.print(f"Again: {again}", style="red", highlight=False)
        if only or time.monotonic() >= until:
            break
        seed = random.Random(seed).randrange(2**31)
    if as_json:
        print(json.dumps({"well": count, "failed": failed}, indent=1))
    else:
        print(f"{count} parts were well, {len(failed)} failed")
        for each in failed:
            print(each["again"])
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
