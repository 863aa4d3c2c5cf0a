"""Mesh-tangling: where a mesh of a simulation is about to fold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.errors import ConfigError
from hyperslab.models.checks import check_at_least, check_batch, check_extents, check_widths
from hyperslab.models.initial import init_he


class MeshTangling(nn.Module):
    """Blocks of 3x3 convolutions, then for every coarse cell the chances of the nodes within.

    ``blocks`` are the channels of each block's convolutions. The first ``num_strided`` blocks halve
    the extents, so that a cell is 2**num_strided nodes wide. The output is a map (1, H, W) of
    numbers from 0 to 1, one for each node of the input; with ``outputs``, that many numbers for
    each cell, (outputs, H / cell, W / cell).
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[int]],
        num_strided: int,
        in_channels: int = 18,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        for channels in blocks:
            check_widths("channels", channels)
        check_at_least(1, in_channels=in_channels)
        if not 0 <= num_strided <= len(blocks):
            raise ConfigError(f"num_strided must be from 0 to {len(blocks)}, got {num_strided}")
        self.in_channels, self.cell = in_channels, 2**num_strided
        self.is_map = outputs is None
        per_cell = self.cell**2 if outputs is None else outputs
        check_at_least(1, outputs=per_cell)

        before = [in_channels, *(channels[-1] for channels in blocks)]
        self.blocks = nn.Sequential(
            *(
                _make_block([before[i], *channels], 2 if i < num_strided else 1, 3 if i else 5)
                for i, channels in enumerate(blocks)
            )
        )
        self.head = nn.Conv2d(before[-1], per_cell, 1, bias=False)
        init_he(self)

    def forward(self, x: Tensor) -> Tensor:
        check_batch(x, "MeshTangling", self.in_channels, 2)
        check_extents(x, "MeshTangling", least=self.cell, multiple_of=self.cell)
        chances = torch.sigmoid(self.head(self.blocks(x)))
        return F.pixel_shuffle(chances, self.cell) if self.is_map else chances


def mesh_1k(
    in_channels: int = 18, outputs: int | None = None, base_channels: int = 128
) -> MeshTangling:
    """The network for 1024x1024: 34,418,688 parameters, cells of 32x32 nodes."""
    check_at_least(1, base_channels=base_channels)
    widths = [(1, 2, 2, 2, 2), (3,) * 5, (4,) * 5, (3,) * 5, (3,) * 5, (1,) * 5]
    return MeshTangling(_scaled(widths, base_channels), 5, in_channels, outputs)


def mesh_2k(
    in_channels: int = 18, outputs: int | None = None, base_channels: int = 128
) -> MeshTangling:
    """The network for 2048x2048: 12,387,584 parameters, cells of 64x64 nodes."""
    check_at_least(1, base_channels=base_channels)
    widths = [(1,) * 3, (2,) * 3, (2,) * 3, (3,) * 3, (3,) * 3, (1,) * 3]
    return MeshTangling(_scaled(widths, base_channels), 6, in_channels, outputs)


class ConvLayer(nn.Module):
    """Convolution, ReLU, then BatchNorm."""

    def __init__(self, in_channels: int, channels: int, *, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(F.relu(self.conv(x), inplace=True))
        return out


def _make_block(channels: Sequence[int], stride: int, kernel: int) -> nn.Sequential:
    first, *others = pairwise(channels)
    return nn.Sequential(
        ConvLayer(*first, kernel=kernel, stride=stride),
        *(ConvLayer(*pair, kernel=3, stride=1) for pair in others),
    )


def _scaled(widths: Sequence[Sequence[int]], base_channels: int) -> list[list[int]]:
    return [[width * base_channels for width in block] for block in widths]
