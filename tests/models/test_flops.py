import copy

import pytest
import torch
from torch import nn

from hyperslab.models import MODELS, describe


def test_convolutions_and_dense_layers_are_counted_apart():
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7))
    found = describe(net, (3, 4, 4))
    assert found.conv_flops == 2 * 3 * 5 * 9 * 16
    assert found.forward_flops == found.conv_flops + 2 * 80 * 7


def test_transposed_convolutions_are_convolutions():
    assert describe(nn.ConvTranspose3d(2, 3, 2, 2), (2, 4, 4, 4)).conv_flops == 2 * 2 * 3 * 8 * 64


def test_a_network_without_products_costs_nothing():
    assert describe(nn.AvgPool2d(2), (1, 8, 8)).forward_flops == 0


def test_the_model_does_not_change():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5)).double()
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = describe(model, (3, 3, 3))  # too small to train on, and still counted
    assert found.output_shape == (5, 1, 1)
    assert model.training
    assert all(p.device.type == "cpu" and p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_shared_weights_are_counted_once():
    first = nn.Linear(4, 4)
    found = describe(nn.Sequential(first, nn.ReLU(), first), (4,))
    assert found.num_parameters == 20
    assert found.forward_flops == 2 * 2 * 16


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_without_memory(name):
    with torch.device("meta"):
        model = MODELS[name]()
    assert all(p.is_meta for p in model.parameters())
