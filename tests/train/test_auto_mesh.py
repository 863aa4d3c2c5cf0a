"""``mesh=auto``: the planner chooses, says so, and is compared with what happens."""

import json
import re
from dataclasses import replace

import pytest
import torch

import hyperslab as hs
from hyperslab.cli.local_ranks import count_ranks
from hyperslab.errors import ConfigError
from hyperslab.testing import Team
from hyperslab.train import auto_mesh
from hyperslab.train.auto_mesh import Forecast
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

SETTINGS = [
    "model.options={size = 16, base_channels = 1, dropout = 0.2, batch_norm = true}",
    "data.batch_size=2",
    "data.validation=0",
    "data.test=0",
    "mesh.device=cpu",
    "train.precision=fp64",
    "train.epochs=6",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.figures=false",
]


def train(folder, files, *changes):
    changes = [f"data.files={files['cosmo']}", f"run.folder={folder}", *SETTINGS, *changes]
    return run(read_config("cosmoflow-64", changes))


def losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.slow
def test_the_choice_comes_first_and_the_comparison_after_20_steps(files, tmp_path, capsys):
    train(tmp_path / "run", files, "mesh=auto")
    lines = capsys.readouterr().err.splitlines()
    assert re.match(r"Planner: one rank is best for 1 rank: .* a step predicted \(", lines[0])
    assert lines[1].startswith("Planner: this machine was not measured, and is taken for ")
    told = [line for line in lines if "measured" in line][1:]
    assert len(told) == 1
    assert re.search(r"predicted .* a step, measured .*s \(median of steps 11 to 20\)", told[0])
    assert read_config(tmp_path / "run").mesh.auto


def on_two_ranks(folder, files):
    outcome = train(folder, files, "mesh=auto", "train.steps=3")
    assert outcome.summary["mesh"].endswith("=2")


def test_the_mesh_that_was_chosen_learns_the_same(files, tmp_path):
    train(tmp_path / "one", files, "train.steps=3")
    with Team(2) as team:
        team.run(on_two_ranks, folder=tmp_path / "two", files=files)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


def test_what_is_chosen_goes_beside_what_the_user_asks_for():
    config = read_config("cosmoflow-64", ["mesh=auto", "train.checkpoint_activations=['head']"])
    best = hs.plan("cosmoflow-64", gpus=4, batch=4, machine="dgx-h100").best
    best = replace(best, plan={"head": {"channel": 4}}, checkpointed=("features.0",))
    used = auto_mesh._with(config, best)
    assert {axis: getattr(used.mesh, axis) for axis in best.mesh} == best.mesh
    assert not used.mesh.auto
    assert used.plan == {"head": {"channel": 4}}
    assert used.train.checkpoint_activations == ("head", "features.0")


def test_a_forecast_is_the_median_of_the_last_steps(monkeypatch):
    now = iter([*range(10), *range(100, 1100, 100), 5000])
    monkeypatch.setattr(auto_mesh.time, "perf_counter", lambda: next(now))
    forecast = Forecast(50.0, torch.device("cpu"))
    told = [forecast.after_step() for _ in range(22)]
    assert [line is not None for line in told].index(True) == 19
    assert "predicted 50 s a step, measured 100 s" in told[19]
    assert "= 0.50" in told[19]
    assert not any(told[20:])


@pytest.mark.parametrize(
    ("changes", "auto", "depth"),
    [
        (["mesh=auto"], True, 1),
        (["mesh.depth=2", "mesh=auto"], True, 1),
        (["mesh.auto=true", "mesh.device=cpu"], True, 1),
        (["mesh=auto", "mesh.auto=false", "mesh.depth=2"], False, 2),
    ],
)
def test_mesh_auto_takes_the_place_of_axes(changes, auto, depth):
    mesh = read_config("cosmoflow-64", changes).mesh
    assert (mesh.auto, mesh.depth) == (auto, depth)


def test_mesh_auto_in_a_file(tmp_path):
    base, path = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text('base = "cosmoflow-64"\n[mesh]\ndepth = 2\ndevice = "cpu"\n')
    path.write_text('mesh = "auto"\nbase = "base.toml"\n')
    mesh = read_config(path).mesh
    assert (mesh.auto, mesh.depth, mesh.device) == (True, 1, "cpu")


def test_axes_beside_mesh_auto():
    with pytest.raises(ConfigError, match=r"^mesh\.auto leaves the axes .* but mesh\.depth = 2"):
        read_config("cosmoflow-64", ["mesh=auto", "mesh.depth=2"])


def test_all_gpus_are_used(monkeypatch):
    monkeypatch.setattr("hyperslab.cli.local_ranks.count_gpus", lambda: 8)
    config = read_config("cosmoflow-64", ["mesh=auto", "data.batch_size=2"])
    assert count_ranks(config, None).num == 8
    assert count_ranks(config, 4).num == 4
