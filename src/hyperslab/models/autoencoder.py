"""Dense autoencoder: a whole image through a few wide layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from hyperslab.errors import ConfigError, check_choice
from hyperslab.io.spec import shown_shape
from hyperslab.models.checks import check_at_least, check_widths
from hyperslab.models.initial import init_glorot

OUTPUTS = {"linear": nn.Identity, "sigmoid": nn.Sigmoid}


class DenseAutoencoder(nn.Module):
    """inputs - hidden - inputs, all dense; several widths are a stack, mirrored on the way out.

    Samples have any shape of ``inputs`` numbers, 256x256x3 as it is, and so has what comes out.
    Layer ``i`` of a stack is ``encoder[i]`` and ``decoder[-1 - i]``. ``output`` says what the
    numbers are like: ``linear``, or ``sigmoid`` for those from 0 to 1.
    """

    def __init__(
        self, inputs: int = 196608, hidden: Sequence[int] = (10000,), output: str = "linear"
    ) -> None:
        super().__init__()
        check_at_least(1, inputs=inputs)
        check_widths("hidden", hidden)
        check_choice("output", output, OUTPUTS)
        self.inputs = inputs
        widths = [inputs, *hidden]
        self.encoder = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths))
        )
        self.decoder = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(b, a), nn.ReLU() if i else OUTPUTS[output]())
                for i, (a, b) in reversed(list(enumerate(pairwise(widths))))
            )
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights, as for a model that was made without values."""
        init_glorot(self, bias=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[1:]) != self.inputs:
            raise ConfigError(
                f"DenseAutoencoder was made for samples of {self.inputs} numbers and is given "
                f"{shown_shape(x.shape[1:])}: set inputs = {math.prod(x.shape[1:])}"
            )
        out: Tensor = self.decoder(self.encoder(x.flatten(1)))
        return out.reshape(x.shape)
