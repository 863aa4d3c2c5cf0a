"""Slabs that no axis splits: what torch makes of the whole tensor, to the last bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hyperslab as hs
from hyperslab.nn.op import OPS
from hyperslab.testing import seeded

X = (2, 4, 5, 6, 7)
WEIGHT = seeded(3, 4, 3, 2, 3)

CASES = {
    "conv": lambda x: F.conv3d(x, WEIGHT, padding=1),
    "conv of one sample": lambda x: F.conv3d(x[0], WEIGHT),
    "average": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "maximum": lambda x: F.max_pool3d(x, 2),
    "maximum and its places": lambda x: F.max_pool3d(x, 2, return_indices=True)[0],
    "dense": lambda x: F.linear(x, seeded(3, 7), seeded(3)),
    "norm of the batch": lambda x: F.batch_norm(x, None, None, training=True),
    "norm of groups": lambda x: F.group_norm(x, 2),
    "activation": lambda x: F.leaky_relu(x, 0.1),
    "activation in place": lambda x: F.relu(x * 2, inplace=True),
    "flat": lambda x: torch.flatten(x, 1) * 2,
    "flat and written": lambda x: (x * 2).flatten(1).mul_(3),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_torchs_to_the_last_bit(name):
    function, mesh = CASES[name], hs.init(device="cpu")
    ours, plain = (seeded(*X).requires_grad_() for _ in range(2))
    out, due = function(hs.shard(ours, mesh)), function(plain)
    assert type(out) is hs.Slab
    assert tuple(out.shape) == tuple(due.shape)
    assert torch.equal(out.local, due)
    coefficients = seeded(*due.shape, seed=1)
    out.local.backward(coefficients)
    due.backward(coefficients)
    assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_are_torchs_and_plain_if_they_are_one_number(reduction):
    mesh = hs.init(device="cpu")
    x, y, labels = seeded(3, 4, 5), seeded(3, 4, 5, seed=1), torch.arange(15).view(3, 5) % 4
    for function, target in ((F.mse_loss, y), (F.cross_entropy, labels)):
        loss = function(hs.shard(x, mesh), hs.shard(target, mesh), reduction=reduction)
        assert isinstance(loss, hs.Slab if reduction == "none" else Tensor)
        assert torch.equal(hs.gather(loss), function(x, target, reduction=reduction))


def test_what_torch_refuses_is_refused_in_the_words_of_the_rule():
    x = hs.shard(seeded(*X), hs.init(device="cpu"))
    with pytest.raises(hs.LayoutError, match="do not fit an input of shape"):
        F.conv3d(x, seeded(3, 5, 3, 3, 3))
    with pytest.warns(UserWarning, match="different to the input size"):
        F.mse_loss(x, hs.shard(seeded(2, 4, 5, 6, 1), x.mesh))


def test_a_rule_of_the_users_own_comes_first():
    x, before = hs.shard(seeded(*X), hs.init(device="cpu")), OPS[F.silu].rule
    try:
        hs.register(F.silu)(lambda x, inplace=False: "mine")
        assert F.silu(x) == "mine"
    finally:
        hs.register(F.silu)(before)


@pytest.mark.ranks(2)
def test_several_ranks_have_rules_for_tensors_that_are_whole_too():
    x = hs.shard(torch.ones(1, 3), hs.init(device="cpu", depth=2))
    with pytest.raises(hs.LayoutError):
        F.linear(x, torch.ones(2, 4))
