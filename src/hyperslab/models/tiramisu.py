"""Climate Tiramisu: storms and rivers of vapour, pixel by pixel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.models.checks import check_at_least, check_batch, check_dropout, check_widths
from hyperslab.models.initial import init_he

MakeLayer = Callable[..., nn.Module]
"""Of the numbers of channels before and after."""


class Tiramisu(nn.Module):
    """Dense blocks on the way down and up again, with the same extents joined.

    ``blocks`` counts the layers of the dense blocks on the way down; the last of them is the
    turning point. Extents need not be even: the way up gives those of the way down. The output is
    one number a class for every pixel, before softmax.

    As it is, 4,813,827 parameters and 321 GFLOP for an image of 16x768x1152.
    """

    def __init__(
        self,
        in_channels: int = 16,
        classes: int = 3,
        growth: int = 16,
        blocks: Sequence[int] = (3, 3, 4, 4, 7, 7, 10),
        base_channels: int = 48,
        dropout: float = 0.2,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, in_channels=in_channels, classes=classes)
        check_at_least(1, growth=growth, base_channels=base_channels)
        check_widths("blocks", blocks)
        check_dropout(dropout)
        self.in_channels = in_channels
        layer = partial(ConvLayer, dropout=dropout, batch_norm=batch_norm)
        *sides, turn = blocks

        self.stem = layer(in_channels, base_channels)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        channels, skips = base_channels, []
        for num_layers in sides:
            self.down.append(Down(channels, num_layers, growth, layer))
            channels += num_layers * growth
            skips.append(channels)
        self.turn = DenseBlock(channels, turn, growth, layer)
        new = turn * growth
        for num_layers in reversed(sides):
            self.up.append(Up(new, skips[-1], num_layers, growth, layer))
            channels, new = new + skips.pop(), num_layers * growth
        self.head = nn.Conv2d(channels + new, classes, 1)
        init_he(self)

    def forward(self, x: Tensor) -> Tensor:
        check_batch(x, "Tiramisu", self.in_channels, 2)
        x = self.stem(x)
        skips = []
        for down in self.down:
            skip, x = down(x)
            skips.append(skip)
        new = self.turn(x)
        for up in self.up:
            x, new = up(new, skips.pop())
        out: Tensor = self.head(torch.cat([x, new], dim=1))
        return out


class DenseBlock(nn.Module):
    """Layers that each see the input and the output of all before; gives their outputs alone."""

    def __init__(self, in_channels: int, num_layers: int, growth: int, layer: MakeLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            layer(in_channels + i * growth, growth) for i in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        known = [x]
        for layer in self.layers:
            known.append(layer(torch.cat(known, dim=1)))
        return torch.cat(known[1:], dim=1)


class Down(nn.Module):
    """A dense block; gives what to keep for the way up, and the same at half the extents."""

    def __init__(self, in_channels: int, num_layers: int, growth: int, layer: MakeLayer) -> None:
        super().__init__()
        self.block = DenseBlock(in_channels, num_layers, growth, layer)
        channels = in_channels + num_layers * growth
        self.shrink = layer(channels, channels, kernel=1, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = torch.cat([x, self.block(x)], dim=1)
        return skip, self.shrink(skip)


class Up(nn.Module):
    """A dense block at the extents of ``skip``; gives its input and what it adds to that."""

    def __init__(
        self, in_channels: int, skip_channels: int, num_layers: int, growth: int, layer: MakeLayer
    ) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(in_channels, in_channels, 3, stride=2, padding=1)
        self.block = DenseBlock(in_channels + skip_channels, num_layers, growth, layer)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.grow(x, output_size=skip.shape[2:]), skip], dim=1)
        return joined, self.block(joined)


class ConvLayer(nn.Module):
    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(F.relu(self.norm(self.conv(x)), inplace=True))
        return out
