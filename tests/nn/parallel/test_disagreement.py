"""Ranks that run different things stop, and say which operator was the first to differ."""

import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.testing import Team, seeded

TIMEOUT_SECONDS = 4
"""What ranks wait for messages that the others do not send."""
SHAPE = (2, 2, 12, 5)


class Net(nn.Module):
    """A convolution, what ``odd`` does on rank 1 and ``even`` on others, and a convolution."""

    def __init__(self, even, odd):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.even, self.odd = even, odd

    def forward(self, x):
        x = self.first(x)
        return self.second((self.odd if x.mesh.rank else self.even)(x))


def cubic(x):
    return F.conv2d(x, torch.ones(2, 2, 5, 5, dtype=x.dtype), padding=2)


def same(x):
    return x


DIFFERENCES = {
    "relu or tanh": (
        F.relu,
        torch.tanh,
        "operator 2 is relu of .* on rank 0 and tanh of .* on rank 1",
    ),
    "a longer halo": (same, cubic, "operator 2 is conv2d of"),
    "a dtype": (
        lambda x: x.to(dtype=torch.bfloat16).double(),
        lambda x: x.to(dtype=torch.float16).double(),
        "operator 2 is to of .*bfloat16 on rank 0 and to of .*float16 on rank 1",
    ),
    "a dtype of a tensor": (
        lambda x: x * torch.ones(1, dtype=torch.float64),
        lambda x: x * torch.ones(1, dtype=torch.float32),
        "operator 2 is __mul__ of .*float64 on rank 0 and __mul__ of .*float32 on rank 1",
    ),
    "autocast": (
        lambda x: x + 1,
        torch.autocast("cpu", torch.bfloat16)(lambda x: x + 1),
        "operator 2 is __add__ of .* on rank 0 and __add__ of .*autocast to bfloat16 on rank 1",
    ),
    "a sum more": (lambda x: x * x.mean(), same, "operator 2 is mean of"),
}


def run_unlike(name, train):
    even, odd, _ = DIFFERENCES[name]
    mesh = hs.init(height=2, device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    model = hs.parallelize(Net(even, odd).double(), mesh)
    try:
        with torch.set_grad_enabled(train):
            out = model(hs.shard(seeded(*SHAPE), mesh))
            if train:
                out.sum().backward()
    except hs.HyperslabError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.every(6)
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_run_different_operators_are_told_the_first_of_them(name, train):
    with Team(2) as team:
        told = team.run(run_unlike, name, train)
    assert all(text.startswith("CommError") for text in told), told
    assert any(re.search(DIFFERENCES[name][2], text) for text in told), told


SCRIPT = """
import sys, torch, hyperslab as hs
from torch import nn

class Bad(nn.Module):
    def forward(self, x):
        if x.mesh.rank == 1:
            raise ValueError("a bad sample")
        return x

torch.manual_seed(0)
mesh = hs.init(height=2, device="cpu", timeout_seconds=60)
net = nn.Sequential(nn.Conv2d(1, 1, 3), Bad(), nn.Conv2d(1, 1, 3))
model = hs.parallelize(net, mesh)
model(hs.shard(torch.ones(1, 1, 9, 9), mesh)).sum().backward()
"""


@pytest.mark.slow
def test_an_error_on_one_rank_is_told_by_the_others_with_the_operator_and_the_module(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in ranks]
    assert all(process.returncode for process in ranks), errors
    assert "ValueError: a bad sample" in errors[1]
    assert "in 1, a Bad" in errors[1]
    assert "CommError: rank 0 lost contact" in errors[0]
    assert re.search(
        r"rank 1 stopped in or after operator 1, conv2d of 1x1x9x9, .*: ValueError: a bad sample",
        errors[0],
    ), errors[0]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 3, padding=1)
        self.blocks = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity(), Spectral()))

    def forward(self, x):
        return self.blocks(self.stem(x))


class Spectral(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x, dim=2)


@pytest.mark.ranks(2)
def test_an_error_inside_a_model_tells_operator_shapes_split_and_module():
    mesh = hs.init(height=2, device="cpu")
    model = hs.parallelize(Deep().double(), mesh)
    with pytest.raises(hs.UnsupportedOp) as caught:
        model(hs.shard(seeded(*SHAPE), mesh))
    text = str(caught.value)
    assert text.startswith("torch.fft.rfft cannot run on a tensor of 2x2x12x5, dim 2 split over")
    assert f"rank {mesh.rank} holds 2x2x6x5" in text
    assert text.endswith("(in blocks.1.1, a Spectral)")


@pytest.mark.ranks(2)
def test_an_error_of_torch_inside_a_model_says_in_which_module_and_on_what():
    mesh = hs.init(height=2, device="cpu")
    model = hs.parallelize(nn.Sequential(nn.ReLU(), nn.Softmax(dim=7)), mesh)
    with pytest.raises(IndexError) as caught:
        model(hs.shard(seeded(*SHAPE), mesh))
    notes = " ".join(caught.value.__notes__)
    assert "in 1, a Softmax" in notes
    assert "softmax of Slab(2x2x12x5, dim 2 split over height=2; rank" in notes


@pytest.mark.ranks(2)
def test_ranks_that_draw_different_masks_are_told_so():
    mesh = hs.init(height=2, device="cpu")
    model = hs.parallelize(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Dropout(0.5)).double(), mesh)
    x = hs.shard(seeded(*SHAPE), mesh)
    torch.manual_seed(mesh.rank)
    with torch.no_grad(), pytest.raises(hs.CommError, match=r"is randint with \d+ on rank 0 and"):
        model(x)
    torch.manual_seed(0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_different_values_are_refused_by_shard_and_rounding_is_not(dtype):
    mesh = hs.init(height=2, device="cpu")
    x = (seeded(*SHAPE) * 9).to(dtype)
    with pytest.raises(hs.CommError, match="ranks differ in the values given to shard: where rank"):
        hs.shard(x + mesh.rank, mesh)
    hs.shard(x * (1 + 1e-9 * mesh.rank) if dtype.is_floating_point else x, mesh)
    hs.shard(torch.full_like(x, torch.nan) if dtype.is_floating_point else x, mesh)


@pytest.mark.ranks(2)
def test_ranks_with_different_losses_are_told_so_in_the_next_forward_pass():
    mesh = hs.init(height=2, device="cpu")
    torch.manual_seed(0)
    model = hs.parallelize(nn.Conv2d(2, 2, 3).double(), mesh)
    x = hs.shard(seeded(*SHAPE), mesh)
    y = model(x)
    (y.abs() if mesh.rank else y.square()).mean().backward()
    with pytest.raises(hs.CommError, match=r"is square of .* on rank 0 and abs of .* on rank 1"):
        model(x).mean().backward()
