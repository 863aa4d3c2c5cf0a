"""Inputs of convolutions with few channels, as kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperslab.kernels.laid_out import Shape, power_of_two
from hyperslab.kernels.memory import empty_channels_last

MIN_CHANNELS_UNPACKED = 8
"""With fewer, rows begin where memory cannot be read in whole sectors."""
MAX_GROUPS = 64
"""Of outputs along the width that a kernel computes at once."""


def pack(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
    """``x`` as kernels read it, copied only where it must be."""
    return Packed.seen_in(x, weight, padding) or Packed.of(x, weight, padding)


@dataclass(frozen=True)
class Packed:
    """Inputs channels last in rows, with zeros around them; 5 dims, with room at the end.

    A block of outputs reads beyond the last row's end.
    """

    data: Tensor
    extents: tuple[int, int, int]
    """Of the outputs."""
    ndim: int
    """Of the inputs before."""
    pads: tuple[int, int, int] = (0, 0, 0)
    """The padding that is not in memory."""
    flat: Tensor | None = None
    """The memory that holds ``data`` and, behind it, room that kernels may read."""

    @property
    def has_room(self) -> bool:
        return self.flat is not None

    @classmethod
    def seen_in(cls, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed | None:
        """``x`` as it is, if that is how kernels can read it."""
        whole = x.unsqueeze(2) if x.ndim == 4 else x
        rows = whole.movedim(1, -1)
        channels = rows.shape[-1]
        if (
            x.dtype != weight.dtype
            or channels != power_of_two(channels)
            or channels < MIN_CHANNELS_UNPACKED
            or not rows.is_contiguous()
        ):
            return None
        pads = (0,) * (5 - x.ndim) + padding
        kernel = (1,) * (5 - x.ndim) + tuple(weight.shape[2:])
        d, h, w = (e + 2 * p - k + 1 for e, p, k in zip(rows.shape[1:4], pads, kernel, strict=True))
        return cls(rows, (d, h, w), x.ndim, (pads[0], pads[1], pads[2]))

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
        from hyperslab.kernels.gpu.few_channels import pack_kernel

        shape = Shape.of(weight, at_once=0)
        pads = (0,) * (5 - x.ndim) + padding
        whole = x.unsqueeze(2) if x.ndim == 4 else x
        n, channels, *extents = whole.shape
        depth, height, width = (e + 2 * p for e, p in zip(extents, pads, strict=True))
        aligned = -(-width // 8) * 8
        room = MAX_GROUPS * shape.group * shape.slots + shape.row
        numel = n * depth * height * aligned * shape.slots
        flat = torch.empty(numel + room, dtype=weight.dtype, device=x.device)
        flat[numel:] = 0
        block = min(256, power_of_two(aligned))
        pack_kernel[(n * depth * height, -(-aligned // block))](
            whole, flat, *whole.stride(), channels, *extents, *pads, depth, height, aligned,
            CHANNELS=shape.slots, BLOCK=block,
        )  # fmt: skip
        d, h, w = (e - k + 1 for e, k in zip((depth, height, width), shape.kernel, strict=True))
        return cls.inside(flat, (n, depth, height, aligned, shape.slots), (d, h, w), x.ndim)

    @classmethod
    def inside(
        cls, flat: Tensor, shape: Sequence[int], extents: tuple[int, int, int], ndim: int
    ) -> Packed:
        """Those of ``shape`` at the beginning of ``flat``."""
        return cls(flat[: math.prod(shape)].view(shape), extents, ndim, flat=flat)

    def outputs(self, filters: int) -> Tensor:
        """Uninitialised, channels last, of the inputs' number of dims."""
        sizes = self.extents if self.ndim == 5 else self.extents[1:]
        return empty_channels_last((self.data.shape[0], filters, *sizes), self.data)

    @property
    def place(self) -> tuple[int, ...]:
        """What kernels are told: strides, extents, padding."""
        return (*self.data.stride()[:3], *self.data.shape[1:4], *self.pads)

    @property
    def num_planes(self) -> int:
        """Of outputs, in all samples."""
        return self.data.shape[0] * self.extents[0]
