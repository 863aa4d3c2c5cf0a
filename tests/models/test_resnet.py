import hashlib

import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import ResNet50, describe
from hyperslab.models.resnet import Bottleneck

TORCHVISION = "d7e4f8bb0a5363446a59c81c3887ccf66900a11651a0ae2dec96d1bb1eb6ea81"
"""The digest of the keys and shapes of ``torchvision.models.resnet50()``."""


def test_its_weights_have_the_names_and_shapes_of_torchvisions():
    with torch.device("meta"):
        state = ResNet50().state_dict()
    text = "\n".join(f"{key} {tuple(value.shape)}" for key, value in state.items())
    assert hashlib.sha256(text.encode()).hexdigest() == TORCHVISION
    assert state["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)


def test_parameters_and_flops_are_the_published_ones():
    with torch.device("meta"):
        found = describe(ResNet50(), (3, 224, 224))
    assert found.num_parameters == 25_557_032
    assert found.forward_flops / 1e9 == pytest.approx(8.18, abs=0.01)
    assert found.output_shape == (1000,)


def test_channels_classes_and_depth_are_options():
    model = ResNet50(classes=5, in_channels=1, base_channels=2, blocks=[1, 2, 1, 1])
    assert model(torch.zeros(2, 1, 33, 50)).shape == (2, 5)
    assert len(model.layer2) == 2


def test_a_bottleneck_adds_its_input_before_the_last_activation():
    block = Bottleneck(8, width=2, stride=1)
    torch.nn.init.zeros_(block.bn3.weight)
    x = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(block(x), x.relu())


def test_a_resnet_has_four_stages():
    with pytest.raises(ConfigError, match=r"four stages, got blocks = \[3, 4\]"):
        ResNet50(blocks=[3, 4])
