"""Pre-training in a program: the same losses and weights on any mesh."""

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.testing import whole

MESHES = [{"sample": 2}, {"height": 2}, {"channel": 2}, {"sample": 2, "height": 2}]


def own_stack():
    """Modules that know nothing of ranks; the second encoder leaves uneven pieces."""
    torch.manual_seed(1)
    outer = (
        nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Sigmoid()),
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1),
    )
    inner = (
        nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.Sigmoid()),
        nn.Sequential(nn.ConvTranspose2d(3, 4, 3, padding=1), nn.Sigmoid()),
    )
    return hs.StackedAutoencoder([outer, inner], tied=True).double()


def numbers(path, axes):
    """The losses of all epochs, and all weights."""
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    torch.manual_seed(1)
    stack = hs.parallelize(own_stack(), mesh)
    data = hs.open(path, sample="x", axes="NCHW")
    losses = hs.pretrain(
        stack,
        data,
        mesh,
        epochs=[2, 1],
        together=1,
        lr=0.1,
        noise=0.2,
        kl=0.1,
        rho=0.3,
        l1=0.01,
        optimizer=torch.optim.SGD,
        batch_size=3,
        dtype=torch.float64,
    )
    assert all(weight.requires_grad for weight in stack.parameters())
    return losses, {name: whole(w.detach()).clone() for name, w in stack.named_parameters()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.random.default_rng(0).normal(size=(8, 2, 13, 9))
    return str(path)


@pytest.fixture(scope="module")
def alone(path):
    return numbers(path, {})


def test_losses_are_those_of_each_epoch_of_each_stage(alone):
    losses, _ = alone
    assert [len(stage) for stage in losses] == [2, 1, 1]
    assert losses[0][1] < losses[0][0]


@pytest.mark.every(2)
@pytest.mark.ranks
@pytest.mark.parametrize("axes", MESHES)
def test_modules_of_a_user_are_pretrained_alike_on_every_mesh(axes, path, alone):
    losses, weights = numbers(path, axes)
    for ours, theirs in zip(losses, alone[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    torch.testing.assert_close(weights, alone[1], rtol=1e-10, atol=1e-10)


def test_what_is_no_parallel_stack_is_refused(path):
    mesh, data = hs.init(device="cpu"), hs.open(path, sample="x", axes="NCHW")
    with pytest.raises(ConfigError, match=r"hyperslab.parallelize\(model, mesh\) first"):
        hs.pretrain(own_stack(), data, mesh, epochs=1)
    net = hs.parallelize(nn.Conv2d(2, 2, 1).double(), mesh)
    with pytest.raises(ConfigError, match="stack of encoders and decoders, and the model is"):
        hs.pretrain(net, data, mesh, epochs=1)
    with pytest.raises(ConfigError, match="has 3 entries, and the model has 2 pairs"):
        hs.pretrain(hs.parallelize(own_stack(), mesh), data, mesh, epochs=[1, 1, 1])
