import json
import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Has the modules of benchmarks/gpu found."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu.")]:
        del sys.modules[name]


def test_a_row_is_on_disk_as_soon_as_it_is_known(tmp_path):
    from gpu.record import Record

    record = Record("times", ["what", "ms"], lambda row: [row["what"], str(row["ms"])])
    record.folder = tmp_path / "made"
    for ms in (1, 2):
        record.add({"what": "step", "ms": ms})
        assert json.loads((tmp_path / "made" / "times.json").read_text())["times"] == record.rows
        assert (tmp_path / "made" / "times.md").read_text().endswith(f"| step | {ms} |\n")


def test_after_its_budget_a_record_is_over():
    from gpu.record import Record

    assert Record("times", [], lambda row: [], budget=-1.0).is_over
    assert not Record("times", [], lambda row: []).is_over


def test_every_shape_of_a_mesh_is_measured_once_and_few_ranks_first():
    from gpu.shards import FEW_RANKS, make_networks, shards

    found = shards(make_networks(small=False))
    keys = [(str(network.case), tuple(axes.items())) for network, axes in found]
    ranks = [math.prod(axes.values()) for _, axes in found]
    assert len(set(keys)) == len(keys)
    assert {1, 2, 4, 8, 16, 32, 64} == set(ranks)
    assert sorted(ranks, key=lambda num: num > FEW_RANKS) == ranks
    assert {len(axes) for _, axes in found} == {0, 1, 2, 3}


def test_a_lone_rank_times_its_blocks_and_the_parts_of_its_convolutions():
    import torch
    from gpu.cases import cosmoflow
    from gpu.lone_rank import LoneTrial, nobody_answers

    case = cosmoflow(32, precision="fp32", width=1)
    model = case.make()
    trial = LoneTrial(case, model, {"depth": 2}, torch.channels_last_3d, torch.device("cpu"))
    trial.refill()
    with nobody_answers(trial.mesh) as traffic:
        trial.step()
        assert traffic.messages
        parts = trial.parts()
    assert len(parts["blocks"]) == len(model.features)
    in_blocks = sum(ms for block in parts["blocks"] for ms in block.values())
    assert parts["strips_ms"] > 0
    assert 0 < parts["interior_ms"] < in_blocks <= parts["ms"]
