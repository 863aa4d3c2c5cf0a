import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import Tiramisu, describe


@pytest.mark.parametrize(("channels", "gflop"), [(16, 320.6), (4, 311.4)])
def test_parameters_and_flops_are_about_the_published_ones(channels, gflop):
    with torch.device("meta"):
        found = describe(Tiramisu(in_channels=channels), (channels, 768, 1152))
    assert found.num_parameters / 1e6 == pytest.approx(4.81, abs=0.005)
    assert found.forward_flops / 1e9 == pytest.approx(gflop, abs=0.1)
    assert found.output_shape == (3, 768, 1152)


@pytest.mark.parametrize("extents", [(16, 24), (17, 9), (1, 30)])
def test_every_pixel_gets_its_classes_whatever_the_extents(extents):
    model = Tiramisu(in_channels=2, classes=5, growth=2, blocks=[1, 2, 1], base_channels=3)
    assert model(torch.zeros(1, 2, *extents)).shape == (1, 5, *extents)


def test_one_block_is_the_smallest_network():
    model = Tiramisu(in_channels=2, growth=2, blocks=[2], base_channels=3, batch_norm=True)
    assert model(torch.zeros(2, 2, 4, 4)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize("blocks", [[], [3, 0]])
def test_blocks_without_layers_are_refused(blocks):
    with pytest.raises(ConfigError, match="blocks must be one or more numbers, each at least 1"):
        Tiramisu(blocks=blocks)


def test_images_with_other_channels_are_refused():
    with pytest.raises(ConfigError, match="2 channels and is given 16x4x4: set in_channels = 16"):
        Tiramisu(in_channels=2, growth=2, blocks=[2])(torch.zeros(1, 16, 4, 4))
