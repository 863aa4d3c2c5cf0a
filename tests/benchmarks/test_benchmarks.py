import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BARS = runpy.run_path(str(BENCHMARKS / "bars.py"))
SMALL = {
    "cube_size.py": [
        *("--size", "16", "--count", "10", "--cubes", "8,16", "--jobs", "1"),
        *("--epochs", "1", "--channels", "1", "--batch-voxels", "4096"),
    ],
    "damaged_files.py": ["--format", "npy", "--count", "8"],
    "dense.py": ["--small"],
    "few_labels.py": ["--quick", "--only", "collisions"],
    "gpu_channels.py": ["--small"],
    "gpu_depth.py": ["--small"],
    "gpu_exchange.py": ["--small"],
    "gpu_halo.py": ["--small"],
    "gpu_kernels.py": ["--small"],
    "gpu_split.py": ["--small"],
    "gpu_step.py": ["--small"],
    "halo_conv.py": ["--sizes", "16", "--rounds", "2"],
    "loader.py": ["--shape", "2x4x8x8", "--samples", "4", "--rounds", "1"],
    "losses.py": ["--library", "monai", "--filter", "DiceLoss"],
    "mutants.py": ["--list"],
    "overhead.py": ["--repeats", "1"],
    "plan_memory.py": ["--small", "--networks", "U-Net", "--meshes", "one"],
    "plan_ours.py": ["--small"],
    "parallel_read.py": ["--size", "16", "--ranks", "2", "--rounds", "1"],
    "read.py": ["--size", "16", "--rounds", "1"],
    "store.py": ["--shape", "2x4x8x8", "--samples", "8", "--rounds", "1", "--ranks", "2"],
    "stress.py": ["--count", "1"],
    "trace.py": ["--turns", "2"],
    "trace_report.py": ["--spans", "20000"],
    "tournament.py": ["--quick"],
    "zoo.py": ["--filter", "Classifier", "--meshes", "split"],
}
ELSEWHERE = {"bars.py", "fuzz.py", "kill.py", "plan_published.py"}  # have tests of their own


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", sorted({path.name for path in BENCHMARKS.glob("*.py")} - ELSEWHERE)
)
def test_every_benchmark_runs_small_and_prints_json(script, monkeypatch):
    command = [sys.executable, str(BENCHMARKS / script), *SMALL[script], "--json"]
    # Set by tests/kernels, whose interpreter would take minutes here.
    environment = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report
    if script.removesuffix(".py") in BARS["SCRIPTS"] + BARS["GPU_SCRIPTS"]:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        rows = runpy.run_path(str(BENCHMARKS / script))["bars"](report)
        assert {type(BARS["Bar"](script, *row).is_met) for row in rows} <= {bool}


def test_relu_on_a_slab_is_held_against_the_least_that_carries_a_tensor():
    sides = {"ours": {"median": 2.0}, "plain": {"median": 1.0}, "averaged": {"median": 4.0}}
    times = {"plain": {"median": 1.2}, "Slab": {"median": 7.0}, "limit": {"median": 5.5}}
    report = {"relu_us": times, "conv_stack_us": sides, "step_us": {"CosmoFlow": sides}}
    rows = runpy.run_path(str(BENCHMARKS / "overhead.py"))["bars"](report)
    (row,) = [BARS["Bar"]("overhead", *row) for row in rows if row[0] == "relu on a Slab, us"]
    assert row.verdict == "MISSED, limit 5.5"


def test_some_of_the_layouts_read_are_held_against_their_bars():
    bars = runpy.run_path(str(BENCHMARKS / "read.py"))["bars"]
    slow = {"hyperslab": 2.0, "hyperslab, 2 threads": 1.5, "h5py read_direct": 4.0}
    fast = {"hyperslab": 1.0, "hyperslab, 2 threads": 0.5, "h5py read_direct": 3.0}
    assert bars({"64^3 gzip": {"full": slow, "D/4": fast, "stored": 0.2}}) == [
        ("64^3 gzip: slowest row, of h5py", 0.5, "<=", 1.0),
        ("64^3 gzip: times h5py", 2.0, ">=", 2.0),
        ("64^3 gzip: gain by a second thread", 2.0 / 1.5, ">=", 1.5),
    ]
    assert bars({"slabs raw": {"full": slow, "stored": 1.0}}) == [
        ("slabs raw: slowest row, of h5py", 0.5, "<=", 1.0)
    ]


@pytest.mark.slow
def test_cubes_are_compared_in_one_process(tmp_path):
    command = [sys.executable, BENCHMARKS / "cube_size.py", "--folder", str(tmp_path / "made")]
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = subprocess.run(
        command, env=os.environ | launched, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "error: this runs in one process, not in 2" in done.stderr
    assert not (tmp_path / "made").exists()
