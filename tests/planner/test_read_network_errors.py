import pytest
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.models import CosmoFlow
from hyperslab.planner.read_network import read_network


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Conv2d(1, 1, 3)

    def forward(self, x):
        return self.gate(x) if x.sum().item() > 0 else x


class Picks(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Picks()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branches(), r"Branches cannot be planned: torch\.Tensor\.item does not run on tensors wi"),
        (Row(), r"torch\.Tensor\.__getitem__ in module inner does not run on tensors without va"),
        (nn.Conv2d(3, 4, 3), r"a sample of 1x8x8 does not go through it: torch\..*conv2d says: "),
        (CosmoFlow(8), r"CosmoFlow takes batches of 4 channels|CosmoFlow"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(model, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_network(model, (1, 8, 8))
    assert "\n" not in str(caught.value)


def test_a_module_needs_a_shape():
    with pytest.raises(ConfigError, match=r"^input_shape is missing"):
        hs.plan(nn.ReLU(), gpus=1, machine="laptop")
