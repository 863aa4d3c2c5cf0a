import json
import sys

import pytest
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.planner.measured import find_calibration
from hyperslab.planner.planning import find_machine

NETS = """
from torch import nn


def make(width=4):
    return nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2))


def other():
    return nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2))
"""


@pytest.fixture
def calibrate(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "nets.py").write_text(NETS)

    def run(name, *arguments):
        command = ["plan", "calibrate", f"{tmp_path / 'nets.py'}:{name}", *arguments]
        return CliRunner().invoke(main, command)

    return run


@pytest.mark.slow
def test_what_was_measured_is_found_by_plans(calibrate):
    assert find_machine(None)[1] is None
    done = calibrate("make", "--input", "1x8x8x8", "--ranks", "1", "--ranks", "2", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["stages"] == 1
    assert calibrate("other", "--input", "1x8x8x8", "--ranks", "1").exit_code == 0
    found = find_calibration()
    assert len(found.kernels) == 3  # a network more is added
    assert [*found.links] == [2]
    machine, measured = find_machine(None, 2)
    assert (machine.inside, machine.cores_per_node > 0) == (found.links[2], True)
    assert measured.__self__ == found


def test_an_input_that_is_no_shape_is_told(calibrate):
    done = calibrate("make", "--input", "1x0x8")
    assert done.exit_code == 2
    assert "'1x0x8' is not channels and extents joined by 'x'" in done.output
