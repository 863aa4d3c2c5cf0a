"""HEPCNN: signal or background, from calorimeter images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.models.checks import check_at_least, check_batch, check_dropout, check_extents


class HEPCNN(nn.Module):
    """Five 3x3 convolutions with pools between them, a global average, one dense layer.

    594,178 parameters as it is. Images have any extents from 16 on.
    """

    NUM_POOLS = 4

    def __init__(
        self, in_channels: int = 3, classes: int = 2, channels: int = 128, dropout: float = 0.5
    ) -> None:
        super().__init__()
        check_at_least(1, in_channels=in_channels, classes=classes, channels=channels)
        check_dropout(dropout)
        self.in_channels = in_channels
        self.features = nn.Sequential(
            ConvBlock(in_channels, channels, nn.MaxPool2d(2), nn.Dropout(dropout)),
            *(
                ConvBlock(channels, channels, nn.MaxPool2d(2), nn.Dropout(dropout))
                for _ in range(self.NUM_POOLS - 1)
            ),
            ConvBlock(channels, channels, nn.AdaptiveAvgPool2d(1)),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        check_batch(x, "HEPCNN", self.in_channels, 2)
        check_extents(x, "HEPCNN", least=2**self.NUM_POOLS)
        out: Tensor = self.head(self.features(x))
        return out


class ConvBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, *then: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.then = nn.Sequential(*then)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(F.relu(self.conv(x), inplace=True))
        return out
