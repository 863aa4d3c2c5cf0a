"""Runs on a GPU, alone and shared by two ranks."""

import json

import pytest
import torch

from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

pytestmark = pytest.mark.gpu

SETTINGS = [
    "model.options={size = 16, base_channels = 2}",
    "data.batch_size=2",
    "data.validation=0.2",
    "data.test=0.1",
    "train.epochs=2",
    "run.log_every=1",
    "run.tensorboard=false",
]


def train(folder, files, *changes, resume=False):
    places = [f"data.files={files['cosmo']}", f"run.folder={folder}"]
    return run(read_config("cosmoflow-64", [*SETTINGS, *places, *changes]), resume=resume)


def losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture
def on_cpu(files, tmp_path):
    train(tmp_path / "cpu", files, "mesh.device=cpu", "train.precision=fp64")
    return losses(tmp_path / "cpu")


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"sample": 1}, {"depth": 2}, {"sample": 2}])
def test_a_gpu_learns_what_a_cpu_learns(axes, files, tmp_path, on_cpu):
    mesh = [f"mesh.{axis}={num}" for axis, num in axes.items()]
    train(tmp_path / "run", files, *mesh, "train.precision=fp64", "mesh.device=cuda")
    assert losses(tmp_path / "run") == pytest.approx(on_cpu, rel=1e-7)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_short_numbers_learn_about_the_same(files, tmp_path, on_cpu, precision):
    layout = f"train.channels_last={str(precision == 'bf16').lower()}"
    outcome = train(tmp_path / "run", files, f"train.precision={precision}", layout)
    assert losses(tmp_path / "run") == pytest.approx(on_cpu, rel=0.1)
    assert outcome.summary["scores"]["test"]["mse"] < 2


@pytest.mark.ranks(2)
def test_a_run_goes_on_with_sharded_weights(files, tmp_path, on_cpu):
    alike = ["train.precision=fp64", "mesh.device=cuda", "mesh.depth=2"]
    train(tmp_path / "run", files, *alike, "train.steps=2")
    train(tmp_path / "run", files, *alike, "train.shard_weights=true", resume=True)
    assert losses(tmp_path / "run") == pytest.approx(on_cpu, rel=1e-7)
    assert torch.cuda.max_memory_allocated() > 0
