"""Weights that are computed from others: normed, standardised, orthogonal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import hyperslab as hs
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place

SHAPE = (2, 3, 8, 8)
PLACES = [Place({"height": 2}), Place({"sample": 2, "width": 2})]


class Standardized(nn.Conv2d):
    """A convolution whose filters have zero mean and unit variance."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.flatten(1).std(1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


MODULES = {
    "weight norm": lambda layer: parametrizations.weight_norm(layer),
    "old weight norm": lambda layer: weight_norm(layer),
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer),
    "old spectral norm": lambda layer: spectral_norm(layer),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "standardised": lambda layer: Standardized(3, 4, 3, padding=1),
}


def build(name):
    torch.manual_seed(0)
    layers = [MODULES[name](nn.Conv2d(3, 4, 3, padding=1)), nn.ReLU(), nn.Conv2d(4, 2, 3)]
    return nn.Sequential(*layers).double()


def train(model, x):
    """Some steps of descent; the losses and, at the end, all parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [t.detach().clone() for t in model.state_dict().values()]


def check_training(place, name):
    mesh, x = place.mesh(), seeded(*SHAPE)
    expected, weights = train(build(name), x)
    losses, ours = train(hs.parallelize(build(name), mesh), hs.shard(x, mesh))
    torch.testing.assert_close(losses, expected)
    for mine, theirs in zip(ours, weights, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_computed_weight_trains_as_in_one_process(run, place, name):
    run(place, check_training, name)
