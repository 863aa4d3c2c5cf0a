"""Stacked autoencoders: pairs of encoder and decoder that can be trained one after the other."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hyperslab.errors import ConfigError, check_choice
from hyperslab.io.spec import shown_shape
from hyperslab.models.checks import check_at_least, check_dropout, check_widths
from hyperslab.models.initial import init_glorot

Stages: TypeAlias = tuple[int, int]
"""The first pair that takes part, and the one after the last."""

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
WANTED = ("output", "code", "both")
POOLS = ("mean", "moments")
LEAST_VARIANCE = 1e-6
"""Keeps the slope of a standard deviation finite where a code is the same everywhere."""
ADAPTIVE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class StackedAutoencoder(nn.Module):
    """Pairs ``(encoder, decoder)`` of any modules, the outermost first.

    Pair ``i`` is ``encoder[i]`` and ``decoder[-1 - i]``; each decoder gives what its encoder is
    given. With ``tied`` each decoder uses the weights of its encoder, transposed, as ``tie`` has
    it. With ``flatten`` the first encoder is given samples as rows of numbers.

    ``stages=(1, 2)`` runs the second pair alone, on the code of the first, and ``(0, 2)`` both.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[nn.Module, nn.Module]],
        *,
        tied: bool = False,
        flatten: bool = False,
    ) -> None:
        super().__init__()
        if not pairs:
            raise ConfigError("a stack needs one pair (encoder, decoder) at least, got none")
        if tied:
            pairs = [(encoder, tie(encoder, decoder)) for encoder, decoder in pairs]
        self.flattens = flatten
        self.encoder = nn.Sequential(*(encoder for encoder, _ in pairs))
        self.decoder = nn.Sequential(*(decoder for _, decoder in reversed(pairs)))

    @property
    def num_stages(self) -> int:
        return len(self.encoder)

    def pair(self, number: int) -> tuple[nn.Module, nn.Module]:
        """The encoder and the decoder of a stage."""
        return self.encoder[number], self.decoder[-1 - number]

    def forward(
        self,
        x: Tensor,
        *,
        stages: Stages | None = None,
        noise: float = 0.0,
        want: str = "output",
    ) -> Any:
        """What the pairs ``stages``, by default all, make of ``x``: a sample, or its code so far.

        ``want`` is ``output``, ``code`` (of the last of them, and no decoder runs), or ``both``:
        the output, then the code of each. While it trains, encoders are given ``x`` with every
        number set to 0 with the probability ``noise``.
        """
        first, stop = stages or (0, self.num_stages)
        code = masked(x, noise) if noise and self.training else x
        if self.flattens and not first:
            code = code.flatten(1)
        codes = []
        for number in range(first, stop):
            code = self.encoder[number](code)
            codes.append(code)
        if want == "code":
            return code
        out = code
        for number in reversed(range(first, stop)):
            out = self.decoder[-1 - number](out)
        out = _shaped(out, x, first)
        return (out, *codes) if want == "both" else out


def masked(x: Tensor, share: float) -> Tensor:
    """``x`` with numbers set to 0, each with the probability ``share``: masking noise.

    Which ones depends on torch's seed and where they are in the whole of ``x``, not on the mesh.
    """
    return x * (torch.rand_like(x) >= share)


def _shaped(out: Tensor, x: Tensor, first: int) -> Tensor:
    """What came back with the shape of what went in."""
    if out.shape == x.shape:
        return out
    if math.prod(out.shape) != math.prod(x.shape):
        raise ConfigError(
            f"the decoder of stage {first} gives samples of {shown_shape(out.shape[1:])} and its "
            f"encoder is given {shown_shape(x.shape[1:])}: a decoder must undo what its encoder "
            "does to the shape (strides divide all extents?)"
        )
    return out.reshape(x.shape)


# Tied weights


def tie(encoder: nn.Module, decoder: nn.Module) -> nn.Module:
    """``decoder`` with the weights of ``encoder``: its last layer's are those of the first.

    A transposed convolution shares the weight of the convolution that it undoes, a dense layer
    becomes a ``TiedLinear``. Biases stay its own. ``decoder`` itself changes where it can.
    """
    sources = [layer for _, layer in _layers(encoder)]
    targets = [*reversed(_layers(decoder))]
    if len(sources) != len(targets):
        raise ConfigError(
            f"the encoder has {len(sources)} layers with weights and the decoder {len(targets)}: "
            "tied weights need as many of both"
        )
    for source, (name, target) in zip(sources, targets, strict=True):
        replaced = _tied(source, target)
        if not name:
            return replaced
        parent, _, own = name.rpartition(".")
        setattr(decoder.get_submodule(parent), own, replaced)
    return decoder


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Dense layers and convolutions, by their names."""
    return [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear | _ConvNd)]


def _tied(source: nn.Module, target: nn.Module) -> nn.Module:
    if isinstance(source, nn.Linear) and isinstance(target, nn.Linear):
        if source.weight.shape == target.weight.t().shape:
            return TiedLinear(source, bias=target.bias)
    elif isinstance(source, _ConvNd) and isinstance(target, _ConvTransposeNd):
        same = ("kernel_size", "stride", "padding", "dilation", "groups")
        if source.weight.shape == target.weight.shape and all(
            getattr(source, name) == getattr(target, name) for name in same
        ):
            target.weight = source.weight
            return target
    raise ConfigError(
        f"weights of {target} cannot be those of {source}: tied weights go from nn.Linear(a, b) to "
        "nn.Linear(b, a), and from a convolution to a transposed one of the same kernel, stride, "
        "padding and channels"
    )


class TiedLinear(nn.Module):
    """A dense layer by the transposed weight of another, which both train; the bias is its own."""

    def __init__(self, source: nn.Linear, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = source.weight
        self.bias = bias

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} to {self.weight.shape[1]}, tied"


# An encoder that learns from few labels


class EncoderHead(nn.Module):
    """The encoder of a stack, and dense layers that make ``outputs`` numbers of its code.

    Codes with space are averaged to ``cells`` cells along each of its dims; with ``pool`` =
    ``moments`` their standard deviations in these cells go to the head too. ``standardize``
    gives these numbers mean 0 and variance 1 over the batch. ``frozen`` leaves the
    encoder as it is, its running statistics too. ``sample_shape`` is that of one sample, channels
    first.
    """

    def __init__(
        self,
        stack: StackedAutoencoder,
        sample_shape: Sequence[int],
        outputs: int,
        *,
        hidden: Sequence[int] = (),
        cells: int = 1,
        pool: str = "mean",
        standardize: bool = False,
        dropout: float = 0.0,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, outputs=outputs, cells=cells)
        check_choice("pool", pool, POOLS)
        check_dropout(dropout)
        if hidden:
            check_widths("hidden", hidden)
        self.encoder, self.flattens, self.frozen = stack.encoder, stack.flattens, frozen
        self.encoder.requires_grad_(not frozen)
        shape = code_shape(stack, sample_shape)
        layers, width = _make_entry(shape, cells, pool)
        if standardize:
            layers.append(nn.BatchNorm1d(width))
        for each in hidden:
            layers += [nn.Linear(width, each), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
            width = each
        head = nn.Sequential(*layers, nn.Linear(width, outputs))
        like = next(stack.encoder.parameters(), torch.empty(0))
        self.head = head.to(like.device, like.dtype)
        self._silence()

    def reset_parameters(self) -> None:
        """Draws all weights, as for a model that was made without values."""
        init_glorot(self, bias=0.0)
        self._silence()

    def _silence(self) -> None:
        """Sets the last layer to 0: drawn weights would stay where few samples say nothing."""
        for parameter in self.head[-1].parameters():
            nn.init.zeros_(parameter)

    def train(self, mode: bool = True) -> EncoderHead:
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x.flatten(1) if self.flattens else x))
        return out


def code_shape(stack: StackedAutoencoder, sample_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one sample's code, found on tensors that take no memory."""
    double = copy.deepcopy(stack).to("meta").eval()
    dtype = next((p.dtype for p in double.parameters()), torch.get_default_dtype())
    try:
        with torch.no_grad():
            code = double(torch.empty(1, *sample_shape, dtype=dtype, device="meta"), want="code")
    except (RuntimeError, ConfigError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(
            f"the encoder cannot take samples of {shown_shape(sample_shape)}: {said}; was it "
            "trained on samples of another shape?"
        ) from error
    return tuple(code.shape[1:])


def _make_entry(shape: Sequence[int], cells: int, pool: str) -> tuple[list[nn.Module], int]:
    """What makes a row of numbers of a code, and how many there are."""
    if len(shape) == 1:
        return [nn.Flatten()], shape[0]
    if not 2 <= len(shape) <= 4:
        raise ConfigError(f"a code of {shown_shape(shape)} has no head: it has no channels")
    average, width = ADAPTIVE_POOLS[len(shape) - 2](cells), shape[0] * cells ** (len(shape) - 1)
    if pool == "moments":
        return [Moments(average), nn.Flatten()], 2 * width
    return [average, nn.Flatten()], width


class Moments(nn.Module):
    """Means in the cells of ``average``, and standard deviations as further channels."""

    def __init__(self, average: nn.Module) -> None:
        super().__init__()
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.dtype == torch.float64 else x.float()
        mean = self.average(x)
        variance = (self.average(x * x) - mean * mean).clamp(min=LEAST_VARIANCE)
        return torch.cat([mean, variance.sqrt()], 1)


def check_activation(name: str) -> type[nn.Module]:
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]
