import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.testing import Team

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
SMALL = [
    *("--size", "32", "--count", "220", "--epochs", "6"),
    *("--set", "model.options.base_channels=8", "--set", "optimizer.lr=1e-3"),
    *("--set", "data.validation=0", "--set", "run.tensorboard=false"),
]
"""Fewer and smaller universes, which three seeds learned to an R2 of sigma_8 of 0.5 to 0.64."""


def run_demo(folder, *arguments):
    command = [sys.executable, str(DEMO), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_demo_learns_sigma_8_on_two_ranks_and_draws_what_it_learned(tmp_path):
    done = run_demo(tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "Starting 2 local ranks (mesh.depth=2)" in done.stderr
    assert float(re.search(r"R2 of sigma_8 (-?\d+\.\d+)", done.stdout)[1]) > 0.3
    assert re.search(r"R2 of Omega_m -?\d+\.\d+", done.stdout)
    figures = Path(re.search(r"Figures are in (.+)", done.stdout)[1])
    assert {"curves.png", "predictions.png"} <= {path.name for path in figures.iterdir()}


def run_here(command):
    """Runs ``python -m hyperslab ...`` in this process."""
    assert command[:3] == [sys.executable, "-m", "hyperslab"]
    done = CliRunner().invoke(main, command[3:])
    return subprocess.CompletedProcess(command, done.exit_code)


def play_demo(*arguments):
    """What the demo ends with, if its commands run in the process that it runs in."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    demo.subprocess = SimpleNamespace(run=run_here)
    sys.argv = [str(DEMO), *arguments]
    try:
        demo.main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.slow
def test_a_network_that_has_learned_nothing_fails_the_demo(tmp_path):
    tiny = ("--size", "8", "--count", "10", "--epochs", "1", "--folder", str(tmp_path))
    changes = ("--set", "mesh.depth=1", "--set", "run.figures=false")
    with Team(1, timeout_seconds=200) as team:
        assert team.run(play_demo, *tiny, *changes) == ["R2 of sigma_8 should be above 0.3"]
