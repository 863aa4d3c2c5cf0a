"""Kills training runs at random moments, lets them go on, and compares what they end with.

    python benchmarks/kill.py                          # 30 kills
    python benchmarks/kill.py --kills 3 --seed 7       # one run, other moments

Every run is killed (a rank, or the process that started the ranks, with SIGKILL: while it starts,
between steps, while it writes a checkpoint), then asked to stop by a signal to one rank, and each
time resumed. After each blow all must have ended within the time-out of the ranks and the grace of
the process that started them, the words must say what happened, the last checkpoint must load, and
the next start must go on from there. In the end the weights must be
those of a run that nobody disturbed, to the bit. Exits with 1 if something is not so.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click
import h5py
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import nn

from hyperslab.cli import local_ranks
from hyperslab.train.checkpoint_folder import check_files, read_manifest
from hyperslab.train.checkpoint_state import empties
from hyperslab.train.checkpoint_tensors import read_index, read_tensors
from hyperslab.train.checkpoints import find_checkpoints
from hyperslab.train.process import CAN_GO_ON

PARENT = "parent"
MOMENTS = ("start", "step", "save")

PATIENCE_SECONDS = 180
"""For a whole run, on a busy machine."""
GRACE_SECONDS = local_ranks.GRACE_SECONDS + local_ranks.KILL_SECONDS
"""For the processes of a run to end after a blow, beyond the time-out of its ranks: what the one
that started them gives those that are left."""

CONFIG = """
[model]
name = "{script}:Slow"
[data]
files = "data.h5"
sample = "x"
target = "y"
axes = "NCHW"
batch_size = 4
validation = 0.25
test = 0
[mesh]
height = {ranks}
device = "cpu"
timeout_seconds = {timeout}
[train]
epochs = 8
[run]
checkpoint_every = 3
tensorboard = false
figures = false
"""


class Slow(nn.Module):
    """A small network that leaves time to be killed."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, x):
        time.sleep(0.02)
        return self.head(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))


class Run:
    """One start of ``hyperslab train`` on the run in ``folder``."""

    def __init__(self, folder, num_ranks, *, resume=False):
        self.num_ranks = num_ranks
        self.checkpoints = folder / "checkpoints"
        self.before = self.newest()
        self.begin = time.monotonic()
        command = [sys.executable, "-m", "hyperslab", "train", "run.toml", "--folder", folder.name]
        self.output = folder.with_suffix(".out").open("w+")
        self.process = subprocess.Popen(
            [*command, *(["--resume"] if resume else [])],
            cwd=folder.parent,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.ranks = {}

    def newest(self):
        return (
            max(find_checkpoints(self.checkpoints), default=0) if self.checkpoints.exists() else 0
        )

    def wait_for(self, moment, delay):
        """Returns at that moment, or when the run has ended."""
        if moment == "start":
            self._wait_until(lambda: self._find_ranks())
        else:
            self._wait_until(lambda: self.newest() > self.before)
        if moment == "save":
            self._wait_until(lambda: [*self.checkpoints.glob("*.partial")], poll_seconds=0.001)
        self._find_ranks()
        time.sleep(delay)

    def hit(self, victim, blow):
        pid = self.process.pid if victim == PARENT else self.ranks[victim]
        with suppress(ProcessLookupError):
            os.kill(pid, blow)

    def end(self, seconds):
        """Waits until nothing of it is left; returns the exit code, or None if something is."""
        until = time.monotonic() + seconds
        while (is_left := self._is_running()) and time.monotonic() < until:
            time.sleep(0.05)
        if is_left:
            for pid in [self.process.pid, *self.ranks.values()]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            return None
        return self.process.returncode

    def _is_running(self):
        return self.process.poll() is None or any(map(is_running, self.ranks.values()))

    def words(self):
        self.output.seek(0)
        return self.output.read()

    def _wait_until(self, condition, poll_seconds=0.02):
        until = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None and not condition() and time.monotonic() < until:
            time.sleep(poll_seconds)

    def _find_ranks(self):
        """The processes of the ranks, by number, when all are there."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    words = stat.with_name("environ").read_bytes().split(b"\0")
                    found |= {
                        int(word[5:]): int(stat.parent.name)
                        for word in words
                        if word[:5] == b"RANK="
                    }
        self.ranks |= found
        return len(self.ranks) == self.num_ranks


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def disturb(folder, num_ranks, timeout, victim, moment, blow, delay, *, resume):
    """Starts a run, strikes it, and tells what came of that, with all that is wrong."""
    run = Run(folder, num_ranks, resume=resume)
    run.wait_for(moment, delay)
    if run.process.poll() is None and victim != PARENT and victim not in run.ranks:
        run.wait_for("start", 0)
    had_ended = run.process.poll() is not None
    struck = time.monotonic()
    if not had_ended:
        run.hit(victim, blow)
    code = run.end(timeout + GRACE_SECONDS)
    row = {
        "victim": victim if victim == PARENT else f"rank {victim}",
        "signal": signal.Signals(blow).name,
        "moment": moment,
        "seconds to end": round(time.monotonic() - struck, 2),
        "exit code": code,
        "went on from": run.before,
        "last checkpoint": run.newest(),
        "had ended": had_ended,
    }
    if code is None:
        row["wrong"] = [f"something was still running {timeout + GRACE_SECONDS:g} s after the blow"]
    else:
        row["wrong"] = [*faults(run, victim, blow, code, resume)]
    return row


def faults(run, victim, blow, code, resume):
    if code == 0:
        return  # the blow came too late
    words = run.words()
    expected = CAN_GO_ON if blow != signal.SIGKILL else -signal.SIGKILL if victim == PARENT else 1
    if code != expected:
        yield f"exit code {code}, not {expected}: {words[-500:]}"
    if expected == 1 and f"rank {victim} was killed by SIGKILL" not in words:
        yield f"no word of rank {victim}: {words[-500:]}"
    went_on = re.search(r"Going on from step (\d+)", words)
    if went_on and int(went_on[1]) != run.before:
        yield f"went on from step {went_on[1]}, not {run.before}"
    if resume and run.before and not went_on and run.newest() > run.before:
        yield "did not go on"
    if blow != signal.SIGKILL and code == expected:
        stopped = json.loads((run.checkpoints.parent / "summary.json").read_text())["step"]
        if stopped != run.newest():
            yield f"stopped at step {stopped}, but the last checkpoint is of step {run.newest()}"
    yield from unreadable(run.checkpoints)


def unreadable(checkpoints):
    """What is wrong with the last checkpoint, if there is one."""
    found = find_checkpoints(checkpoints) if checkpoints.exists() else {}
    if not found:
        return
    folder = found[max(found)]
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest.files)
        index = read_index(folder, manifest)
        read_tensors(empties(list(manifest.trees.values())), index, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table shall tell
        yield f"{type(error).__name__}: {error}"


def finish(folder, num_ranks, *, resume):
    """Lets a run go to its end; returns its weights, and what is wrong."""
    run = Run(folder, num_ranks, resume=resume)
    code = run.end(PATIENCE_SECONDS)
    if code is None:
        return {}, [f"not done after {PATIENCE_SECONDS} s: {run.words()[-500:]}"]
    if code != 0:
        return {}, [f"ended with exit code {code}: {run.words()[-500:]}"]
    return load_file(folder / "model.safetensors"), []


def draw_blows(chance, kills, num_ranks, startup_seconds):
    """Kills at random, and one polite request at the end."""
    victims = [*range(num_ranks), *range(num_ranks), PARENT]
    for _ in range(kills):
        moment = chance.choice(MOMENTS)
        longest = {"start": startup_seconds, "step": 0.3, "save": 0.01}[moment]
        yield chance.choice(victims), moment, signal.SIGKILL, chance.uniform(0, longest)
    asked = chance.choice([signal.SIGTERM, signal.SIGUSR1])
    yield chance.randrange(num_ranks), "step", asked, chance.uniform(0, 0.3)


def prepare(folder, ranks, timeout):
    random_numbers = np.random.default_rng(0)
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"] = random_numbers.normal(size=(24, 1, 4 * ranks, 6)).astype(np.float32)
        file["y"] = random_numbers.normal(size=(24, 2)).astype(np.float32)
    text = CONFIG.format(script=Path(__file__).absolute(), ranks=ranks, timeout=timeout)
    (folder / "run.toml").write_text(text)


def stress(folder, num_ranks, timeout, seed, kills, per_run):
    """Rows of a table: every blow, and the end of every run."""
    begin = time.monotonic()
    expected, wrong = finish(folder / "undisturbed", num_ranks, resume=False)
    seconds = time.monotonic() - begin
    yield {"run": "undisturbed", "moment": "end", "wrong": wrong}
    if wrong:
        return
    chance = random.Random(seed)
    for number in range(-(-kills // per_run)):
        resume = False
        count = min(per_run, kills - number * per_run)
        for blow in draw_blows(chance, count, num_ranks, seconds / 2):
            row = disturb(folder / f"run{number}", num_ranks, timeout, *blow, resume=resume)
            yield {"run": number, **row}
            resume = (folder / f"run{number}" / "config.toml").exists()
        found, wrong = finish(folder / f"run{number}", num_ranks, resume=resume)
        different = [key for key, each in expected.items() if not same(found.get(key), each)]
        if different and not wrong:
            wrong = [f"{', '.join(different)} differ from those of the undisturbed run"]
        yield {"run": number, "moment": "end", "equal": not different, "wrong": wrong}


def same(mine, other):
    return mine is not None and torch.equal(mine, other)


@click.command(help=__doc__)
@click.option("--kills", default=30, show_default=True, help="How many, over all runs.")
@click.option("--per-run", default=3, show_default=True, help="How many in one run.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2), help="Of each run.")
@click.option("--timeout", default=20.0, show_default=True, help="Of the ranks, in seconds.")
@click.option("--seed", default=0, show_default=True, help="Of victims and moments.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def main(kills, per_run, ranks, timeout, seed, as_json):
    rows, console = [], Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="hyperslab-kill-") as name:
        prepare(Path(name), ranks, timeout)
        for row in stress(Path(name), ranks, timeout, seed, kills, per_run):
            rows.append(row)
            console.print(" ".join(f"{key}={each}" for key, each in row.items()), highlight=False)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        Console(width=120).print(table_of(rows))
    raise SystemExit(1 if any(row["wrong"] for row in rows) else 0)


def table_of(rows):
    table = Table(title="Runs that were killed, and went on")
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "wrong"]
    for key in (*columns, "right"):
        table.add_column(key)
    for row in rows:
        shown = ("" if row.get(key) is None else str(row[key]) for key in columns)
        table.add_row(*shown, "no" if row["wrong"] else "yes")
    return table


if __name__ == "__main__":
    main()
