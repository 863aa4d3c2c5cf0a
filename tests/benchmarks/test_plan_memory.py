import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


@pytest.mark.parametrize(
    "args",
    [
        ["--networks", "U-Net", "--meshes", "depth=2", "channel=2"],
        pytest.param(["--networks", "U-Net", "CosmoFlow", "ResNet-50"], marks=pytest.mark.slow),
    ],
    ids=["U-Net", "all"],
)
def test_peaks_of_memory_are_foreseen_within_a_tenth(args):
    environment = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--small", "--json", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["checkpoints"] > 0 for row in rows} == {False, True}
    for what, measured, sign, bar in runpy.run_path(str(SCRIPT))["bars"](rows):
        assert sign == "<="
        assert measured <= bar, (what, rows)
