"""Processes of a run that are killed; ``benchmarks/kill.py`` does more of it."""

import json
import subprocess
import sys
from pathlib import Path

KILL = Path(__file__).parents[2] / "benchmarks" / "kill.py"


def test_a_run_that_is_killed_thrice_and_stopped_once_ends_with_the_same_weights():
    # This seed kills rank 1 in a step, rank 0 in a save, the parent in a start, and has rank 1
    # asked to stop by SIGUSR1.
    command = [sys.executable, KILL, "--kills", "3", "--seed", "218", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *blows, end = json.loads(done.stdout)[1:]
    late = blows[-1]["had ended"]  # before the signal came, on a busy machine
    assert [row["exit code"] for row in blows] == [1, 1, -9, 0 if late else 75]
    assert end["equal"]
