import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperslab.synth import Universes, produce

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_cosmoflow.py"


@pytest.fixture
def scores(run_python, tmp_path):
    """R2 of each parameter, as the example prints them in ``tmp_path``."""

    def run(depth, epochs=2):
        small = ["--epochs", epochs, "--channels", 2, "--batch-size", 4, "--depth", depth]
        ranks = run_python(EXAMPLE, "universes/*.h5", *small, cwd=tmp_path, num_ranks=depth)
        assert not any(rank.returncode for rank in ranks), "".join(rank.stderr for rank in ranks)
        printed = "".join(rank.stdout for rank in ranks)
        return [float(r2) for r2 in re.findall(r"R2 of \w+ +(-?\d+\.\d+)", printed)]

    return run


@pytest.mark.slow
def test_the_loop_goes_on_after_a_stop_on_two_ranks_as_it_would_have_on_one(scores, tmp_path):
    produce(Universes(size=16, count=20), tmp_path / "universes")
    alone = scores(depth=1)
    assert len(alone) == 4
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000002")
    assert scores(depth=2) == pytest.approx(alone, rel=0.02, abs=0.02)
    assert (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").exists()


def test_one_epoch_is_a_run_too(scores, tmp_path):
    produce(Universes(size=16, count=10), tmp_path / "universes")
    assert len(scores(depth=1, epochs=1)) == 4


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
