"""CosmoFlow: cosmological parameters from cubes of dark matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.errors import ConfigError
from hyperslab.io.spec import shown_shape
from hyperslab.models.checks import check_at_least, check_batch, check_dropout
from hyperslab.models.initial import init_glorot

WIDTHS = (1, 2, 4, 8, 16, 16, 16)
"""Channels of the convolutions, in units of ``base_channels``."""
STRIDED = 3
"""The convolution with stride 2."""


class CosmoFlow(nn.Module):
    """Seven 3^3 convolutions with average pools, then three dense layers that see 2^3 cells.

    A cube of ``size``, a power of two, has log2(size) - 2 pools, one after each of the first
    convolutions; what is more than seven (from 1024 on) follows the last. The network of
    every size so has the same weights, 9,437,636 of them with ``base_channels=16``; other numbers
    scale all layers but the last.
    """

    def __init__(
        self,
        size: int = 512,
        in_channels: int = 4,
        outputs: int = 4,
        base_channels: int = 16,
        dropout: float = 0.2,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        _check_size(size)
        check_at_least(1, in_channels=in_channels, outputs=outputs, base_channels=base_channels)
        check_dropout(dropout)
        self.size, self.in_channels = size, in_channels
        channels = [in_channels, *(width * base_channels for width in WIDTHS)]
        self.features = nn.Sequential(*_make_blocks(size, channels, batch_norm))
        self.head = _make_head(channels[-1], outputs, dropout)
        init_glorot(self, bias=0.1)

    def forward(self, x: Tensor) -> Tensor:
        extents = check_batch(x, "CosmoFlow", self.in_channels, 3)
        if any(extent != self.size for extent in extents):
            raise ConfigError(
                f"CosmoFlow was made for cubes of {shown_shape([self.size] * 3)} and is given "
                f"{shown_shape(extents)}: set its size to that of the samples, or tile them"
            )
        out: Tensor = self.head(self.features(x))
        return out


class ConvBlock(nn.Module):
    def __init__(
        self, in_channels: int, channels: int, *, stride: int, num_pools: int, batch_norm: bool
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(channels) if batch_norm else nn.Identity()
        self.pool = nn.Sequential(*(nn.AvgPool3d(3, stride=2, padding=1) for _ in range(num_pools)))

    def forward(self, x: Tensor) -> Tensor:
        # In place: of the largest tensors in the network there is one copy less.
        out: Tensor = self.pool(F.leaky_relu(self.norm(self.conv(x)), inplace=True))
        return out


def _make_blocks(size: int, channels: Sequence[int], batch_norm: bool) -> Iterator[ConvBlock]:
    for i, (before, after) in enumerate(pairwise(channels)):
        yield ConvBlock(
            before,
            after,
            stride=2 if i == STRIDED else 1,
            num_pools=_pools(size)[i],
            batch_norm=batch_norm,
        )


def _make_head(channels: int, outputs: int, dropout: float) -> nn.Sequential:
    cells = channels * 2**3
    return nn.Sequential(
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(cells, cells),
        nn.LeakyReLU(),
        nn.Dropout(dropout),
        nn.Linear(cells, channels),
        nn.LeakyReLU(),
        nn.Dropout(dropout),
        nn.Linear(channels, outputs),
    )


def _pools(size: int) -> list[int]:
    """How many pools follow each convolution."""
    num_pools = size.bit_length() - 3
    last = len(WIDTHS) - 1
    return [int(i < num_pools) for i in range(last)] + [max(0, num_pools - last)]


def _check_size(size: int) -> None:
    if size < 8 or size.bit_count() != 1:
        raise ConfigError(
            "CosmoFlow's size must be a power of two from 8 on, such as "
            f"{_nearest_power(size)}, got {size}"
        )


def _nearest_power(size: int) -> int:
    below = 1 << (max(size, 8).bit_length() - 1)
    return below if size - below <= 2 * below - size else 2 * below
