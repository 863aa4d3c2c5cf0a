"""CosmoFlow: cosmological parameters from cubes of dark matter."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.errors import ConfigError
from hyperslab.models.checks import check_at_least, check_batch, check_dropout, shown
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
        self.features = nn.Sequential(
            *(
                ConvBlock(
                    channels[i],
                    channels[i + 1],
                    stride=2 if i == STRIDED else 1,
                    num_pools=num_pools,
                    batch_norm=batch_norm,
                )
                for i, num_pools in enumerate(_pools(size))
            )
        )
        seen = channels[-1] * 2**3
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(seen, seen),
            nn.LeakyReLU(),
            nn.Dropout(dropout),
            nn.Linear(seen, channels[-1]),
            nn.LeakyReLU(),
            nn.Dropout(dropout),
            nn.Linear(channels[-1], outputs),
        )
        init_glorot(self, bias=0.1)

    def forward(self, x: Tensor) -> Tensor:
        check_batch(x, "CosmoFlow", self.in_channels, 3)
        if any(extent != self.size for extent in x.shape[2:]):
            raise ConfigError(
                f"CosmoFlow was made for cubes of {shown([self.size] * 3)} and is given "
                f"{shown(x.shape[2:])}: set its size to that of the samples, or tile them"
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


def _check_size(size: int) -> None:
    if size < 8 or size.bit_count() != 1:
        powers = [2**n for n in range(3, max(11, size.bit_length() + 2 if size > 0 else 0))]
        nearest = min(powers, key=lambda power: abs(power - size))
        raise ConfigError(
            f"CosmoFlow's size must be a power of two from 8 on, such as {nearest}, got {size}"
        )


def _pools(size: int) -> list[int]:
    """How many pools follow each convolution."""
    num_pools = size.bit_length() - 3
    last = len(WIDTHS) - 1
    return [int(i < num_pools) for i in range(last)] + [max(0, num_pools - last)]
