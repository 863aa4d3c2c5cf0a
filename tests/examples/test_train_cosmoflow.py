import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyperslab.synth import Universes, produce

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_cosmoflow.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def scores(folder, *launcher, depth):
    """R2 of each parameter, as the example prints them."""
    small = ["--epochs", "2", "--channels", "2", "--batch-size", "4", "--depth", str(depth)]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), "universes/*.h5", *small],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return [float(r2) for r2 in re.findall(r"R2 of \w+ +(-?\d+\.\d+)", done.stdout)]


def test_the_loop_goes_on_after_a_stop_on_two_ranks_as_it_would_have_on_one(tmp_path):
    produce(Universes(size=16, count=20), tmp_path / "universes")
    alone = scores(tmp_path, depth=1)
    assert len(alone) == 4
    shutil.rmtree(tmp_path / "checkpoints" / "epoch_0002")
    assert scores(tmp_path, *TORCHRUN, depth=2) == pytest.approx(alone, rel=0.02, abs=0.02)
    assert (tmp_path / "checkpoints" / "epoch_0002" / ".metadata").exists()
