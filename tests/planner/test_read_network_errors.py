import warnings

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.models import CosmoFlow
from hyperslab.planner.page import to_html
from hyperslab.planner.read_network import read_network
from hyperslab.planner.report import to_dict


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


class Spectral(nn.Module):
    """Its first weight is complex, and a ramp is made on the CPU."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, 3, dtype=torch.cfloat))
        self.lift = nn.Conv2d(1, 3, 1)

    def forward(self, x):
        y = torch.fft.irfft2(
            torch.einsum("bixy,io->boxy", torch.fft.rfft2(self.lift(x)), self.gain)
        )
        ramp = torch.linspace(0, 1, y.shape[-1])
        return torch.mul(ramp, y) + torch.arange(y.shape[-2])[:, None]


def test_what_forward_makes_on_the_cpu_needs_no_values():
    network = read_network(Spectral(), (1, 8, 8))
    assert network.layers[-1].shape == (3, 8, 8)
    assert {"rfft2", "irfft2", "einsum", "mul", "add"} <= {layer.op for layer in network.layers}


def test_a_function_may_write_into_what_it_is_given():
    class Scaled(nn.Module):
        def forward(self, x):
            return torch.mul(x, 2, out=torch.empty_like(x))

    with torch.no_grad():  # as in the power iterations of spectral_norm
        assert read_network(Scaled(), (1, 8, 8)).layers[-1].op == "mul"
    normed = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 3, 3))
    assert read_network(normed, (1, 8, 8)).layers[-1].op == "conv2d"


def test_lazy_and_compiled_modules_are_refused_in_words_of_their_own():
    with pytest.raises(
        ConfigError, match=r"0\.weight of a lazy module has no shape yet: run the mod"
    ):
        read_network(nn.Sequential(nn.LazyConv2d(3, 3)), (1, 8, 8))
    with warnings.catch_warnings(action="ignore"):  # torch.jit is on its way out
        scripted = nn.Sequential(torch.jit.script(nn.ReLU()))
    with pytest.raises(
        ConfigError, match=r"0 is compiled by torch\.jit, and its operators do not sh"
    ):
        read_network(scripted, (1, 8, 8))


def test_functions_without_a_rule_are_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            return self.cells(x.transpose(1, 2))[0]

    found = hs.plan(Recurrent(), (4, 8), gpus=2, machine="laptop")
    assert "There is no rule for gru in cells, which stops where a mesh splits" in str(found)
    assert "no rule" not in str(hs.plan(Recurrent(), (4, 8), gpus=1, machine="laptop"))
    assert to_dict(found)["without_rule"] == ["gru in cells"]
    assert "There is no rule for gru in cells" in to_html(found)


def test_a_module_needs_a_shape():
    with pytest.raises(ConfigError, match=r"^input_shape is missing"):
        hs.plan(nn.ReLU(), gpus=1, machine="laptop")
