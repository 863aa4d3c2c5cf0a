"""3-D U-Net: a label for every cell of a volume."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.errors import check_choice
from hyperslab.models.checks import check_at_least, check_batch, check_extents
from hyperslab.models.initial import init_he

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm3d,
    "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
    "none": lambda channels: nn.Identity(),
}


class UNet3d(nn.Module):
    """Two convolutions a level, down by max pools and up by transposed convolutions (Cicek et al.,
    2016).

    The second convolution of level ``i`` has 2**(i + 1) * ``base_channels`` channels. Convolutions
    are padded, unlike the original's, so that the output has the extents of the input: one number
    a class for every cell, before softmax. Extents need not divide: where a pool left out a
    last plane, the way up gives it back. As it is, 19,072,291 parameters for 3 channels and 3
    classes.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 2,
        base_channels: int = 32,
        levels: int = 4,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        check_at_least(1, in_channels=in_channels, classes=classes)
        check_at_least(1, base_channels=base_channels, levels=levels)
        check_choice("norm", norm, NORMS)
        self.in_channels, self.levels = in_channels, levels
        widths = [base_channels * 2 ** (level + 1) for level in range(levels)]
        before = [in_channels, *widths]
        self.down = nn.ModuleList(
            DoubleConv(before[i], width // 2, width, norm) for i, width in enumerate(widths)
        )
        self.pool = nn.MaxPool3d(2)
        self.grow = nn.ModuleList(
            nn.ConvTranspose3d(width, width, 2, stride=2, bias=False)
            for width in reversed(widths[1:])
        )
        self.up = nn.ModuleList(
            DoubleConv(below + width, width, width, norm)
            for below, width in zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True)
        )
        self.head = nn.Conv3d(widths[0], classes, 1)
        init_he(self)

    def forward(self, x: Tensor) -> Tensor:
        check_batch(x, "UNet3d", self.in_channels, 3)
        check_extents(x, f"UNet3d of {self.levels} levels", least=2 ** (self.levels - 1))
        skips: list[Tensor] = []
        for block in self.down:
            x = block(self.pool(x) if skips else x)
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            skip = skips.pop()
            x = block(torch.cat([skip, grow(x, output_size=skip.shape[2:])], dim=1))
        out: Tensor = self.head(x)
        return out


class DoubleConv(nn.Module):
    def __init__(self, in_channels: int, between: int, channels: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, between, 3, padding=1, bias=norm == "none")
        self.norm1 = NORMS[norm](between)
        self.conv2 = nn.Conv3d(between, channels, 3, padding=1, bias=norm == "none")
        self.norm2 = NORMS[norm](channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(x)), inplace=True)
