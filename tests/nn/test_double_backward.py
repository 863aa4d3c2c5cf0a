"""Gradients of gradients, as a gradient penalty takes them."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.dist_ops import choices
from hyperslab.testing import averaged, seeded

SHAPE = (2, 4, 9, 6)
CASES = {
    "conv": lambda x, w: F.conv2d(x, w, padding=1) ** 2,
    "conv, in the middle": lambda x, w: F.conv2d(x, w) ** 2,
    "conv, strided": lambda x, w: F.conv2d(x, w, stride=2) ** 2,
    "batch norm": lambda x, w: F.batch_norm(F.conv2d(x, w), None, None, training=True) ** 3,
    "group norm": lambda x, w: F.group_norm(F.conv2d(x, w), 2) ** 3,
    "pool and mean": lambda x, w: (F.avg_pool2d(x * x, 3, 1, 1) * w.sum()) * x.mean(),
    "transposed": lambda x, w: torch.tanh(F.conv_transpose2d(x, w)),
    "resize": lambda x, w: F.interpolate(x * w.sum(), scale_factor=1.7, mode="bicubic") ** 2,
    "max and slices": lambda x, w: (x * x)[:, :, 1:] * F.adaptive_max_pool2d(x * w.mean(), (8, 6)),
    "softmax": lambda x, w: torch.softmax(x * w.sum(), 2),
    "variance": lambda x, w: x * w.sum() * x.var(dim=(2, 3), keepdim=True),
}


def penalty(function, x, weight):
    """The squared norm of the input's gradient, as WGAN-GP has it."""
    out = function(x, weight)
    coefficients = seeded(*out.shape, seed=1)
    (grad,) = torch.autograd.grad(
        (out * coefficients).sum(), x.local if isinstance(x, hs.Slab) else x, create_graph=True
    )
    return grad


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axes", [{"height": 2}, {"sample": 2, "width": 2}], ids=str)
def test_a_gradient_penalty_has_the_gradients_of_one_process(axes, name):
    with patch.object(choices, "MIN_INTERIOR_NUMEL", 1):
        _check_gradient_penalty(axes, name)


def _check_gradient_penalty(axes, name, cuts=None):
    mesh = hs.init(**axes, device="cpu")
    x, weight = seeded(*SHAPE), seeded(4, 4, 3, 3, seed=2)
    grads = []
    for parallel in (False, True):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        taken = hs.shard(leaf, mesh, cuts=cuts) if parallel else leaf
        grad = penalty(CASES[name], taken, w)
        if parallel:
            # The gradient of the sum of all ranks' losses is num_ranks times that of one loss.
            grad = taken.with_local(grad / mesh.num_ranks)
        (grad**2).sum().backward()
        grads.append((leaf.grad, averaged(w, mesh) if parallel else w.grad))
    for ours, serial in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(ours, serial, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)
def test_a_rank_without_outputs_takes_part():
    _check_gradient_penalty({"width": 2}, "conv, in the middle", {"width": [0, 5, 6]})


LAYERS = {"conv": lambda: nn.Conv2d(2, 2, 3, padding=1), "batch norm": lambda: nn.BatchNorm2d(2)}


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_used_twice_has_the_gradients_of_one_process_with_a_graph(name):
    mesh, grads = hs.init(height=2, device="cpu"), []
    for parallel in (False, True):
        torch.manual_seed(0)
        net, x = Twice(LAYERS[name]()).double(), seeded(2, 2, 11, 8)
        net.layer.weight.data += 0.3
        weights = [*net.parameters()]
        given = hs.shard(x, mesh) if parallel else x
        with patch.object(choices, "MIN_INTERIOR_NUMEL", 0):
            out = (hs.parallelize(net, mesh) if parallel else net)(given)
            loss = (out * seeded(*out.shape, seed=1)).sum()
            grads.append(torch.autograd.grad(loss, weights, create_graph=True))
    for ours, serial in zip(*reversed(grads), strict=True):
        mean = ours.detach() / mesh.num_ranks
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, serial.detach())
