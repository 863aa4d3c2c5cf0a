import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import HEPCNN, describe


def test_hepcnn_has_the_published_number_of_parameters():
    with torch.device("meta"):
        found = describe(HEPCNN(), (3, 224, 224))
    assert found.num_parameters == 594_178
    assert found.output_shape == (2,)


def test_images_have_any_extents_from_16_on():
    model = HEPCNN(in_channels=1, classes=5, channels=4)
    assert model(torch.zeros(2, 1, 16, 37)).shape == (2, 5)
    with pytest.raises(ConfigError, match="extents of at least 16, got 15x40"):
        model(torch.zeros(2, 1, 15, 40))


def test_dropout_is_a_probability():
    with pytest.raises(ConfigError, match="dropout must be from 0 to below 1, got 1"):
        HEPCNN(dropout=1.0)
