"""ResNet-50, with the names of torchvision's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.errors import ConfigError
from hyperslab.models.checks import check_at_least, check_batch, check_widths

EXPANSION = 4
"""Channels that a bottleneck gives, for each that it computes with."""


class ResNet50(nn.Module):
    """Residual bottlenecks on images; its ``state_dict`` is that of torchvision's ``resnet50``.

    ``blocks`` counts the bottlenecks of the four stages. 25,557,032 parameters as it is.
    """

    def __init__(
        self,
        classes: int = 1000,
        in_channels: int = 3,
        base_channels: int = 64,
        blocks: Sequence[int] = (3, 4, 6, 3),
    ) -> None:
        super().__init__()
        check_at_least(1, classes=classes, in_channels=in_channels, base_channels=base_channels)
        check_widths("blocks", blocks)
        if len(blocks) != 4:
            raise ConfigError(f"ResNet50 has four stages, got blocks = {list(blocks)}")
        self.in_channels = in_channels
        self.conv1 = nn.Conv2d(in_channels, base_channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(base_channels)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = [base_channels * 2**stage for stage in range(4)]
        given = [base_channels, *(width * EXPANSION for width in widths)]
        self.layer1 = _make_stage(given[0], widths[0], blocks[0], stride=1)
        self.layer2 = _make_stage(given[1], widths[1], blocks[1], stride=2)
        self.layer3 = _make_stage(given[2], widths[2], blocks[2], stride=2)
        self.layer4 = _make_stage(given[3], widths[3], blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(given[4], classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        check_batch(x, "ResNet50", self.in_channels, 2)
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


class Bottleneck(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        channels = width * EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        kept = x if self.downsample is None else self.downsample(x)
        return F.relu(out + kept, inplace=True)


def _make_stage(in_channels: int, width: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        Bottleneck(in_channels, width, stride),
        *(Bottleneck(width * EXPANSION, width, 1) for _ in range(num_blocks - 1)),
    )
