"""Weights of convolutions with few input channels, laid out as kernels read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A convolution over padded inputs: its sizes, and how its weights are laid out for a kernel.

    2-d convolutions have a depth of 1.
    """

    filters: int
    channels: int
    kernel: tuple[int, int, int]
    block_k: int
    """How many numbers of a group's window are multiplied at once."""

    @classmethod
    def of(cls, weight: Tensor, *, at_once: int) -> Shape:
        """With blocks that hold one plane of the kernel, or as many as ``at_once`` numbers do."""
        filters, channels, *flat, height, width = weight.shape
        whole = (flat[0] if flat else 1, height, width)
        one = cls(filters, channels, whole, 0)
        block_k = max(16, one.row, min(at_once, power_of_two(whole[0] * one.row)))
        return cls(filters, channels, whole, block_k)

    @property
    def slots(self) -> int:
        """Channels a voxel has room for."""
        return power_of_two(self.channels)

    @property
    def group(self) -> int:
        return max(2, self.kernel[2] - 1)

    @property
    def row(self) -> int:
        """The numbers that a group of outputs reads of one row: a power of two."""
        return (self.kernel[2] - 1 + self.group) * self.slots

    @property
    def block_f(self) -> int:
        return min(power_of_two(max(16, self.filters)), 64 // self.group)

    @property
    def layout(self) -> tuple[int, int, int, int, int]:
        """Of the weights: blocks of filters, height, blocks of depth, a block's two dims."""
        planes = self.block_k // self.row
        blocks = -(-self.kernel[0] // planes)
        tiles = -(-self.filters // self.block_f)
        return (tiles, self.kernel[1], blocks, self.block_k, self.group * self.block_f)

    @property
    def constants(self) -> dict[str, int]:
        """What kernels are compiled for."""
        depth, height, _ = self.kernel
        return {
            "CHANNELS": self.slots,
            "KERNEL_D": depth,
            "KERNEL_H": height,
            "GROUP": self.group,
            "ROW": self.row,
            "BLOCK_K": self.block_k,
            "BLOCK_F": self.block_f,
        }


def power_of_two(number: int) -> int:
    """The smallest that is not less than ``number``."""
    return 1 << (number - 1).bit_length()


@lru_cache(maxsize=256)
def _places(shape: Shape, device: torch.device) -> Tensor:
    """Where each weight lies in the laid out weights: in a place for each output of a group."""
    planes = shape.block_k // shape.row
    f, c, d, h, w, p = torch.meshgrid(
        *(torch.arange(n) for n in (shape.filters, shape.channels, *shape.kernel, shape.group)),
        indexing="ij",
    )
    index = [
        f // shape.block_f,
        h,
        d // planes,
        d % planes * shape.row + (w + p) * shape.slots + c,
        p * shape.block_f + f % shape.block_f,
    ]
    flat = torch.zeros_like(f)
    for place, extent in zip(index, shape.layout, strict=True):
        flat = flat * extent + place
    return flat.to(device)


@lru_cache(maxsize=256)
def _sources(shape: Shape, device: torch.device) -> Tensor:
    """Which weight lies at each place; the one after the last is zero."""
    places = _places(shape, device)
    num = places[..., 0].numel()
    found = torch.full((math.prod(shape.layout),), num, device=device)
    numbers = torch.arange(num, device=device).view(places.shape[:-1])
    found[places.flatten()] = numbers[..., None].expand(places.shape).flatten()
    return found


def lay_out(weight: Tensor, shape: Shape) -> Tensor:
    """The weights as kernels read them."""
    padded = F.pad(weight.detach().flatten(), (0, 1))
    return padded[_sources(shape, weight.device)]


def gather_grads(sums: Tensor, shape: Shape, like: Tensor) -> Tensor:
    """The gradient of weights from that of laid out weights: the adjoint of ``lay_out``."""
    grads = sums.flatten()[_places(shape, sums.device)].sum(-1)
    return grads.view(like.shape).to(like.dtype)
