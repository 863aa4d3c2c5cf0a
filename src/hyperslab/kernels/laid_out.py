"""Weights of convolutions with few input channels, laid out as kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from hyperslab.kernels.launch import Launch, power_of_two


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

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(sizes: tuple[int, ...], at_once: int) -> Shape:
        """Of weights of these ``sizes``, with blocks of one plane of the kernel, or of as many
        planes as ``at_once`` numbers are.
        """
        filters, channels, *others = sizes
        kernel = in_three_dims(others, 1)
        one = Shape(filters, channels, kernel, 0)
        block_k = max(16, one.row, min(at_once, power_of_two(kernel[0] * one.row)))
        return Shape(filters, channels, kernel, block_k)

    @cached_property
    def slots(self) -> int:
        """Channels a voxel has room for."""
        return power_of_two(self.channels)

    @cached_property
    def group(self) -> int:
        return max(2, self.kernel[2] - 1)

    @cached_property
    def row(self) -> int:
        """The numbers that a group of outputs reads of one row: a power of two."""
        return (self.kernel[2] - 1 + self.group) * self.slots

    @cached_property
    def block_f(self) -> int:
        return min(power_of_two(max(16, self.filters)), 64 // self.group)

    @cached_property
    def layout(self) -> tuple[int, int, int, int, int]:
        """Of the weights: blocks of filters, height, blocks of depth, a block's two dims."""
        planes = self.block_k // self.row
        blocks = -(-self.kernel[0] // planes)
        tiles = -(-self.filters // self.block_f)
        return (tiles, self.kernel[1], blocks, self.block_k, self.group * self.block_f)

    @cached_property
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


def lay_out(weight: Tensor, shape: Shape, *, turned: bool = False) -> Tensor:
    """The weights as kernels read them: in a place for each output of a group, else zeros.

    Where ``turned`` they are those with which gradients of outputs are convolved.
    """
    out = torch.empty(shape.layout, dtype=weight.dtype, device=weight.device)
    _lay_out(shape, weight.stride(), weight.device, turned)(weight, out)
    return out


def gather_grads(sums: Tensor, shape: Shape, weight: Tensor) -> Tensor:
    """The gradient of ``weight`` from those of laid out weights that programs of a kernel found.

    They are ``sums[block of filters, program, ...]``.
    """
    grads = torch.empty_like(weight)
    _gather(shape, sums.shape[1], grads.stride(), grads.device)(sums, grads)
    return grads


LAID_AT_ONCE = 1024
"""Places."""
GATHERED_AT_ONCE = 64
"""Programs' sums."""


@lru_cache(maxsize=1024)
def _lay_out(
    shape: Shape,
    strides: tuple[int, ...],
    device: torch.device,
    turned: bool,
) -> Launch:
    from hyperslab.kernels.gpu.laid_out import lay_out_kernel

    numel = math.prod(shape.layout)
    first, second, *others = strides
    ends = (second, first) if turned else (first, second)
    numbers = (shape.filters, shape.channels, *ends, *in_three_dims(others, 0), numel)
    constants = {**shape.constants, "BLOCK": LAID_AT_ONCE, "TURNED": turned}
    return Launch(lay_out_kernel, (-(-numel // LAID_AT_ONCE),), device, numbers, constants)


@lru_cache(maxsize=1024)
def _gather(
    shape: Shape,
    programs: int,
    strides: tuple[int, ...],
    device: torch.device,
) -> Launch:
    from hyperslab.kernels.gpu.laid_out import gather_kernel

    grid = (shape.channels, math.prod(shape.kernel), shape.layout[0])
    numbers = (programs, shape.filters, *strides[:2], *in_three_dims(strides[2:], 0))
    constants = {**shape.constants, "AT_ONCE": GATHERED_AT_ONCE}
    return Launch(gather_kernel, grid, device, numbers, constants)


def in_three_dims(sizes: Sequence[int], missing: int) -> tuple[int, int, int]:
    """Those of depth, height and width, ``missing`` for the depth of two dims."""
    depth, height, width = (missing,) * (3 - len(sizes)) + tuple(sizes)
    return depth, height, width
