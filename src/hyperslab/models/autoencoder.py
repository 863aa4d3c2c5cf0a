"""Autoencoders: a sample through few numbers and back, by dense layers or by convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from hyperslab.errors import ConfigError, check_choice
from hyperslab.io.spec import shown_shape
from hyperslab.models.checks import check_at_least, check_batch, check_widths
from hyperslab.models.initial import init_glorot
from hyperslab.models.stacked import StackedAutoencoder, Stages, check_activation

OUTPUTS = {"linear": nn.Identity, "sigmoid": nn.Sigmoid}
CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


class DenseAutoencoder(StackedAutoencoder):
    """inputs - hidden - inputs, all dense; several widths are a stack, mirrored on the way out.

    Samples have any shape of ``inputs`` numbers, 256x256x3 as it is, and so has what comes out.
    Layer ``i`` of a stack is ``encoder[i]`` and ``decoder[-1 - i]``. ``output`` says what the
    numbers are like: ``linear``, or ``sigmoid`` for those from 0 to 1. ``tied`` decoders use the
    transposed weights of their encoders.
    """

    def __init__(
        self,
        inputs: int = 196608,
        hidden: Sequence[int] = (10000,),
        output: str = "linear",
        activation: str = "relu",
        tied: bool = False,
    ) -> None:
        check_at_least(1, inputs=inputs)
        check_widths("hidden", hidden)
        check_choice("output", output, OUTPUTS)
        act = check_activation(activation)
        widths = [inputs, *hidden]
        pairs = [
            (
                nn.Sequential(nn.Linear(a, b), act()),
                nn.Sequential(nn.Linear(b, a), act() if i else OUTPUTS[output]()),
            )
            for i, (a, b) in enumerate(pairwise(widths))
        ]
        super().__init__(pairs, tied=tied, flatten=True)
        self.inputs = inputs
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights, as for a model that was made without values."""
        init_glorot(self, bias=0.0)

    def forward(
        self,
        x: Tensor,
        *,
        stages: Stages | None = None,
        noise: float = 0.0,
        want: str = "output",
    ) -> Any:
        if not (stages and stages[0]) and math.prod(x.shape[1:]) != self.inputs:
            raise ConfigError(
                f"DenseAutoencoder was made for samples of {self.inputs} numbers and is given "
                f"{shown_shape(x.shape[1:])}: set inputs = {math.prod(x.shape[1:])}"
            )
        return super().forward(x, stages=stages, noise=noise, want=want)


class ConvAutoencoder(StackedAutoencoder):
    """Convolutions that divide all extents by ``stride``, one for each of ``channels``, and back.

    ``dims`` is 1, 2 or 3. ``kernel - stride`` must be even, so that transposed convolutions undo
    the shapes; extents are multiples of ``stride`` to the power of the number of layers.
    ``output`` and ``tied`` are as for ``DenseAutoencoder``.
    """

    def __init__(
        self,
        in_channels: int = 4,
        channels: Sequence[int] = (16, 32, 64),
        dims: int = 3,
        kernel: int = 4,
        stride: int = 2,
        output: str = "linear",
        activation: str = "relu",
        batch_norm: bool = False,
        tied: bool = False,
    ) -> None:
        check_at_least(1, in_channels=in_channels, stride=stride)
        check_widths("channels", channels)
        if dims not in CONVOLUTIONS:
            raise ConfigError(f"dims must be 1, 2 or 3, got {dims}")
        check_choice("output", output, OUTPUTS)
        if kernel < stride or (kernel - stride) % 2:
            raise ConfigError(
                f"kernel - stride must be even and not below 0, got kernel = {kernel} and stride = "
                f"{stride}: choose kernel = {stride + 2}"
            )
        act, widths = check_activation(activation), [in_channels, *channels]
        conv, back, norm = CONVOLUTIONS[dims]
        padding = (kernel - stride) // 2

        def pairs() -> Iterator[tuple[nn.Module, nn.Module]]:
            for i, (a, b) in enumerate(pairwise(widths)):
                norms = [norm(b)] if batch_norm else []
                encoder = nn.Sequential(conv(a, b, kernel, stride, padding), *norms, act())
                last = act() if i else OUTPUTS[output]()
                yield encoder, nn.Sequential(back(b, a, kernel, stride, padding), last)

        super().__init__([*pairs()], tied=tied)
        self.in_channels, self._dims = in_channels, dims
        self._multiple = stride ** len(channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights, as for a model that was made without values."""
        init_glorot(self, bias=0.0)

    def forward(
        self,
        x: Tensor,
        *,
        stages: Stages | None = None,
        noise: float = 0.0,
        want: str = "output",
    ) -> Any:
        if not (stages and stages[0]):
            extents = check_batch(x, "ConvAutoencoder", self.in_channels, self._dims)
            if any(extent % self._multiple for extent in extents):
                raise ConfigError(
                    f"ConvAutoencoder needs extents that are multiples of {self._multiple}, got "
                    f"{shown_shape(extents)}: pad or crop the samples, or use fewer layers"
                )
        return super().forward(x, stages=stages, noise=noise, want=want)
