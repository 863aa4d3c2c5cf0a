"""What a run says before its first step."""

from datetime import timedelta

import pytest
import torch

from hyperslab.comm.local_sockets import LocalSockets
from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Grid
from hyperslab.train.read_config import read_config
from hyperslab.train.start_report import start_report


def mesh(depth=1, device="cpu", backend=None, sockets=None):
    grid, timeout = Grid((1, 1, depth, 1, 1)), timedelta(seconds=1)
    return Mesh(grid, 0, torch.device(device), backend, timeout, sockets=sockets)


def report(*changes, on=None, **nums):
    parts = {name: [None] * num for name, num in {"train": 8, **nums}.items()}
    return start_report(read_config("cosmoflow-64", changes), on or mesh(), parts)


def test_a_run_says_what_is_held_back_and_how_it_was_chosen():
    told = report("data.validation=0.2", "data.test=held/*.h5", validation=2, test=3)[1]
    assert told == (
        "Data: 8 samples to train on; held back: 2 for validation (data.validation = 0.2, drawn by "
        "train.seed = 0), 3 for test (the files of data.test)"
    )
    assert "none for test (data.test = 0)" in report("data.test=0")[1]


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (mesh(), "Mesh: one rank on cpu, no messages"),
        (mesh(2, "cpu", "gloo"), "Mesh: depth=2, 2 ranks on cpu, messages by gloo; samples by sh"),
        (
            mesh(2, "cpu", "gloo", sockets=LocalSockets({})),
            "messages by gloo, small ones within a node by sockets; samples by sh",
        ),
        (mesh(2, "cuda", "cpu:gloo,cuda:nccl"), "2 ranks on cuda, messages by NCCL;"),
        (mesh(2, "cuda", "gloo"), "messages by gloo through host memory"),
    ],
    ids=["one", "gloo", "sockets", "nccl", "one-gpu"],
)
def test_a_run_says_which_mesh_and_what_carries_messages(on, words):
    assert words in report(on=on)[0]


def test_a_run_says_that_a_batch_is_larger_than_the_data():
    assert len(report("data.batch_size=8")) == 2
    assert "batch_size = 9 is larger than the 8 samples" in report("data.batch_size=9")[2]
