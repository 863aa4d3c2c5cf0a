"""What an error says of shapes that do not fit."""

import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.train.fitting import fit_values


@pytest.mark.parametrize(
    ("output", "target"),
    [((2, 3, 8, 8), (2, 3, 4, 4)), ((2, 1, 8, 8), (2, 4, 4)), ((2, 8), (2, 1, 4))],
)
def test_where_channels_agree_the_advice_is_about_extents(output, target):
    with pytest.raises(ConfigError, match="their extents differ"):
        fit_values(torch.zeros(output), torch.zeros(target))


@pytest.mark.parametrize(
    ("output", "target"), [((2, 3, 8, 8), (2, 1, 8, 8)), ((2, 3), (2, 4)), ((2, 3, 8, 8), (2, 5))]
)
def test_where_channels_differ_it_is_about_their_number(output, target):
    with pytest.raises(ConfigError, match=r"set the number of outputs in model\.options"):
        fit_values(torch.zeros(output), torch.zeros(target))
