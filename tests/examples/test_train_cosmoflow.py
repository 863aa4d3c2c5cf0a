import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperslab.synth import Universes, produce

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_cosmoflow.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def scores(folder, *launcher, depth, epochs=2):
    """R2 of each parameter, as the example prints them."""
    small = ["--epochs", str(epochs), "--channels", "2", "--batch-size", "4", "--depth", str(depth)]
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


def test_one_epoch_is_a_run_too(tmp_path):
    produce(Universes(size=16, count=10), tmp_path / "universes")
    assert len(scores(tmp_path, depth=1, epochs=1)) == 4


def test_no_step_is_made_at_a_rate_of_0():
    example = runpy.run_path(str(EXAMPLE))
    for epochs, warmup in ((1, 1.0), (4, 1.0), (4, 0.0), (1, 0.01)):
        options = SimpleNamespace(epochs=epochs, warmup_epochs=warmup, lr=2.0)
        optimizer = SimpleNamespace(param_groups=[{}])
        rates = []
        for step in range(10 * epochs):
            example["set_rate"](optimizer, options, step / 10, 1 / 10)
            rates.append(optimizer.param_groups[0]["lr"])
        assert min(rates) > 0
        assert max(rates) == pytest.approx(2.0)
