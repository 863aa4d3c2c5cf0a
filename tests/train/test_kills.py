"""Processes of a run that are killed; ``benchmarks/kill.py`` does it at random moments."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

KILL = Path(__file__).parents[2] / "benchmarks" / "kill.py"

MODEL = """
import json, os, signal
from torch import nn
from hyperslab.train import checkpoints

BLOW = json.loads(os.environ.get("BLOW", "null"))
# [rank, moment, how many of them, victim, signal]


class Struck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, x):
        if self.training:
            count("step")
        return self.head(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))


def write_and_count(*arguments):
    write_tensors(*arguments)
    count("save")


def count(moment):
    counts[moment] += 1
    if BLOW and [int(os.environ["RANK"]), moment, counts[moment]] == BLOW[:3]:
        os.kill({"rank": os.getpid(), "parent": os.getppid()}[BLOW[3]], BLOW[4])


counts = {"step": 0, "save": 0}
write_tensors, checkpoints.write_tensors = checkpoints.write_tensors, write_and_count
"""
CONFIG = """
[model]
name = "model.py:Struck"
[data]
files = "data.h5"
sample = "x"
target = "y"
axes = "NCHW"
batch_size = 4
validation = 0.25
test = 0
[mesh]
height = 2
device = "cpu"
[train]
epochs = 4
[run]
checkpoint_every = 3
tensorboard = false
figures = false
"""


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = draw.normal(size=(24, 1, 8, 6)).astype(np.float32)
        file["y"] = draw.normal(size=(24, 2)).astype(np.float32)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def train(folder, name, *arguments, blow=None):
    """The exit code of a run and what it said."""
    command = [sys.executable, "-m", "hyperslab", "train", "run.toml"]
    command += ["--set", f"run.folder={name}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BLOW": json.dumps(blow)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_is_killed_thrice_and_stopped_once_ends_with_the_same_weights(folder):
    code, told = train(folder, "undisturbed")
    assert code == 0, told
    blows = [
        ([1, "step", 5, "rank", signal.SIGKILL], 1, "rank 1 was killed by SIGKILL"),
        ([0, "save", 1, "rank", signal.SIGKILL], 1, "rank 0 was killed by SIGKILL"),
        ([1, "step", 2, "parent", signal.SIGKILL], -signal.SIGKILL, ""),
        ([1, "step", 7, "rank", signal.SIGUSR1], 75, "SIGUSR1"),
    ]
    resume = []
    for blow, expected, words in blows:
        code, told = train(folder, "struck", *resume, blow=blow)
        assert (code, words in told) == (expected, True), told
        resume = ["--resume"]
    code, told = train(folder, "struck", *resume)
    assert code == 0, told
    assert "Going on from step" in told
    whole, struck = (
        load_file(folder / run / "model.safetensors") for run in ("undisturbed", "struck")
    )
    assert whole.keys() == struck.keys()
    assert all(torch.equal(whole[key], struck[key]) for key in whole)


def test_runs_that_are_killed_at_random_moments_go_on():
    command = [sys.executable, KILL, "--kills", "3", "--seed", "218", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, end = json.loads(done.stdout)
    assert end["equal"]


STACK = """
import hyperslab as hs


class Struck(hs.StackedAutoencoder):
    def __init__(self):
        super().__init__([
            (nn.Sequential(nn.Conv2d(1, 3, 4, 2, 1), nn.ELU()), nn.ConvTranspose2d(3, 1, 4, 2, 1)),
            (nn.Sequential(nn.Conv2d(3, 2, 3, 1, 1), nn.ELU()), nn.ConvTranspose2d(2, 3, 3, 1, 1)),
        ], tied=True)

    def forward(self, x, **how):
        if self.training:
            count("step")
        return super().forward(x, **how)
"""
STAGES = ["stages.epochs=[2,2]", "stages.noise=0.2", "train.epochs=2", "task.kind=reconstruction"]


def test_a_run_in_stages_is_killed_in_each_and_ends_with_the_same_weights(folder):
    """Five steps an epoch: ten to a stage. After the last blow it goes on on another mesh."""
    model, counting = MODEL.split("class Struck")
    (folder / "model.py").write_text(model + counting[counting.index("def write_and") :] + STACK)
    settings = [word for each in [*STAGES, "optimizer.name=sgd"] for word in ("--set", each)]
    code, told = train(folder, "undisturbed", *settings)
    assert code == 0, told
    blows = [
        ([1, "step", 5, "rank", signal.SIGKILL], 1),
        ([0, "step", 12, "rank", signal.SIGKILL], 1),
        ([1, "step", 3, "parent", signal.SIGKILL], -signal.SIGKILL),
        ([1, "step", 9, "rank", signal.SIGUSR1], 75),
    ]
    resume = []
    for blow, expected in blows:
        code, told = train(folder, "struck", *settings, *resume, blow=blow)
        assert code == expected, told
        resume = ["--resume"]
    mesh = ["--set", "mesh.height=1", "--set", "mesh.sample=2"]
    code, told = train(folder, "struck", *settings, *mesh, "--resume")
    assert code == 0, told
    whole, struck = (
        load_file(folder / run / "model.safetensors") for run in ("undisturbed", "struck")
    )
    torch.testing.assert_close(whole, struck, rtol=1e-4, atol=1e-6)
