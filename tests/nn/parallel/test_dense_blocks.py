"""Dense layers of which every rank keeps a block train as they do in one process."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hyperslab as hs
from hyperslab.models import DenseAutoencoder
from hyperslab.testing import seeded

BLOCKS = {"*": {"split": "blocks"}}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, 0.01),
}


class Tied(nn.Module):
    """The decoder is the encoder, transposed."""

    def __init__(self, inputs=13, hidden=7):
        super().__init__()
        self.encoder = nn.Linear(inputs, hidden)
        self.bias = nn.Parameter(torch.zeros(inputs))

    def forward(self, x):
        return F.linear(torch.sigmoid(self.encoder(x)), self.encoder.weight.t(), self.bias)


def stack(*widths, bias=True, between=nn.ReLU):
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), between()]
    return nn.Sequential(*layers[:-1])


NETS = {
    "relu": (lambda: stack(12, 8, 12), 12),
    "uneven": (lambda: stack(13, 7, 13, between=nn.Sigmoid), 13),
    "deep, no bias": (lambda: stack(9, 11, 5, 11, 9, bias=False), 9),
    "narrow": (lambda: stack(5, 1, 3, 1, 5), 5),
    "tied": (Tied, 13),
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(model, x, make_optimizer, *, clip=None, steps=5):
    """Losses of some steps; the clipped norms too."""
    optimizer, told = make_optimizer(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        if clip is not None:
            told.append(float(hs.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        told.append(loss.item())
    return told


def check_trained(net, num_inputs, mesh, *, is_sharded=True, optimizer="sgd", clip=None):
    torch.manual_seed(5)
    serial = net().double()
    ours = hs.parallelize(copy.deepcopy(serial), mesh, plan=BLOCKS)
    assert all(isinstance(weight, DTensor) for weight in ours.parameters() if weight.ndim > 1)
    x = seeded(6, num_inputs)
    axes = ("sample", "channel") if is_sharded else (None, None)
    make = OPTIMIZERS[optimizer]
    expected = trained(serial, x, make, clip=clip)
    found = trained(ours, hs.shard(x, mesh, axes=axes), make, clip=clip)
    assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)
    for (name, mine), theirs in zip(ours.named_parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine), theirs, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: name + text
        )


@pytest.mark.ranks
@pytest.mark.every(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("axes", [{"channel": 2, "sample": 2}, {"channel": 2, "depth": 2}])
@pytest.mark.parametrize("net", NETS)
def test_layers_cut_into_blocks_train_as_in_one_process(net, axes, is_sharded, optimizer):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    check_trained(*NETS[net], mesh, is_sharded=is_sharded, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize("net", NETS)
def test_blocks_on_eight_ranks_train_as_in_one_process(net):
    mesh = hs.init(channel=4, sample=2, device="cpu", timeout_seconds=100)
    check_trained(*NETS[net], mesh, optimizer="adam", clip=0.1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("net", ["uneven", "tied"])
def test_the_norm_of_gradients_of_blocks_is_that_of_one_process(net):
    mesh = hs.init(channel=2, sample=2, device="cpu", timeout_seconds=100)
    check_trained(*NETS[net], mesh, clip=0.05)


@pytest.mark.ranks(2)
def test_blocks_need_a_second_axis():
    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    with pytest.raises(hs.ConfigError, match=r"over channel and one other axis, and the mesh is"):
        hs.parallelize(stack(4, 4), mesh, plan=BLOCKS)


# Memory


class Largest(TorchDispatchMode):
    """How many elements the largest tensor had that any function gave within it."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, torch.Tensor) and not each.is_meta:
                local = each.to_local() if isinstance(each, DTensor) else each
                self.numel = max(self.numel, local.untyped_storage().nbytes() // each.itemsize)
        return out


def local_numel(tensors):
    return sum((x.to_local() if isinstance(x, DTensor) else x).numel() for x in tensors)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"channel": 2, "sample": 2}, {"channel": 2, "depth": 2}])
def test_no_rank_holds_a_whole_matrix_at_any_time(axes):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    torch.manual_seed(5)
    with Largest() as largest:
        with torch.device("meta"):
            net = DenseAutoencoder(3 * 8 * 8, (160,))  # larger than the random state
        model = hs.parallelize(net, mesh, plan=BLOCKS)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        trained(model, hs.shard(seeded(4, 3, 8, 8).float(), mesh), lambda _: optimizer, clip=1.0)
    total = sum(weight.numel() for weight in model.parameters())
    parts = [*model.parameters(), *(weight.grad for weight in model.parameters())]
    parts += [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    assert local_numel(parts) <= 1.15 * 4 * total / 4
    assert largest.numel <= 1.15 * 160 * 192 / 4


@pytest.mark.ranks(4)
def test_what_cuts_the_rows_of_a_layer_cuts_the_columns_of_the_next():
    mesh = hs.init(channel=2, sample=2, device="cpu", timeout_seconds=100)
    model = hs.parallelize(stack(12, 8, 6, 12), mesh, plan=BLOCKS)
    first, second, third = (layer.weight.placements for layer in model[::2])
    assert [placement.dim for placement in first] == [0, 1]
    assert [placement.dim for placement in second] == [1, 0]
    assert third == first
