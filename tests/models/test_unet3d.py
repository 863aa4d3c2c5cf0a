import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import UNet3d, describe
from hyperslab.models.unet3d import DoubleConv


def test_a_unet_has_the_parameters_of_the_original():
    with torch.device("meta"):
        bare, normed = (UNet3d(3, 3, norm=norm) for norm in ("none", "batch"))
    assert describe(bare, (3, 16, 16, 16)).num_parameters == 19_069_955
    assert describe(normed, (3, 16, 16, 16)).num_parameters == 19_072_291  # a scale a channel more


@pytest.mark.parametrize("extents", [(8, 8, 8), (9, 4, 11)])
@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
def test_every_cell_gets_its_classes_whatever_the_extents(extents, norm):
    model = UNet3d(in_channels=2, classes=3, base_channels=2, levels=3, norm=norm)
    assert model(torch.rand(2, 2, *extents)).shape == (2, 3, *extents)


def test_each_of_two_convolutions_has_its_activation():
    block = DoubleConv(1, 4, 3, norm="none")
    x = torch.randn(2, 1, 4, 4, 4)
    torch.testing.assert_close(block(x), block.conv2(block.conv1(x).relu()).relu())


def test_one_level_is_the_smallest_network():
    assert UNet3d(base_channels=2, levels=1)(torch.rand(1, 1, 3, 2, 1)).shape == (1, 2, 3, 2, 1)


def test_volumes_too_small_to_be_halved_are_refused():
    with pytest.raises(
        ConfigError, match="UNet3d of 4 levels needs extents of at least 8, got 8x7"
    ):
        UNet3d(base_channels=1)(torch.zeros(1, 1, 8, 7, 8))


def test_an_unknown_norm_is_refused():
    with pytest.raises(ConfigError, match="norm must be one of batch, instance, none, got 'layer'"):
        UNet3d(norm="layer")
