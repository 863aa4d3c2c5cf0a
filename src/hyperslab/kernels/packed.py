"""Inputs of convolutions with few channels, as kernels read them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hyperslab.kernels.laid_out import Shape, in_three_dims
from hyperslab.kernels.launch import Launch, power_of_two
from hyperslab.kernels.memory import empty_channels_last

MIN_CHANNELS_UNPACKED = 8
"""With fewer, rows begin where memory cannot be read in whole sectors."""
MAX_GROUPS = 64
"""Of outputs along the width that a kernel computes at once."""

Triple = tuple[int, int, int]


class Geometry(NamedTuple):
    """Where inputs lie in memory, channels last in rows, and what outputs they have."""

    samples: int
    sizes: Triple
    strides: Triple
    """Of samples, depth and height."""
    pads: Triple
    """The padding that is not in memory."""
    extents: Triple
    """Of the outputs."""
    ndim: int
    """Of the inputs before."""
    has_room: bool
    """Whether there are zeros around the inputs, and behind them memory that may be read."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """What kernels are told."""
        return (*self.strides, *self.sizes, *self.pads)

    @property
    def num_planes(self) -> int:
        """Of outputs, in all samples."""
        return self.samples * self.extents[0]


class Packed(NamedTuple):
    """Inputs as kernels read them."""

    memory: Tensor
    geometry: Geometry

    def empty(self, channels: int, extents: Triple) -> Tensor:
        """Uninitialised, channels last, of the inputs' number of dims."""
        sizes = extents[5 - self.geometry.ndim :]
        return empty_channels_last((self.geometry.samples, channels, *sizes), self.memory)


def pack(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
    """``x`` as kernels read it, copied only where it must be."""
    if x.dtype == weight.dtype:
        geometry = _seen_in(x.shape, x.stride(), weight.shape, padding)
        if geometry is not None:
            return Packed(x, geometry)
    return packed_copy(x, weight, padding)


def packed_copy(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
    """``x`` in the dtype of ``weight``, with zeros around it and room behind."""
    geometry, numel, launch = _copied(x.shape, x.stride(), weight.shape, padding, x.device)
    memory = torch.empty(numel, dtype=weight.dtype, device=x.device)
    launch(x, memory)
    return Packed(memory, geometry)


@lru_cache(maxsize=1024)
def _seen_in(
    shape: torch.Size,
    strides: tuple[int, ...],
    weights: torch.Size,
    padding: tuple[int, ...],
) -> Geometry | None:
    """Where ``x`` lies as it is, if that is how kernels can read it."""
    samples, channels, *extents = shape
    if channels != power_of_two(channels) or channels < MIN_CHANNELS_UNPACKED:
        return None
    sizes, pads = in_three_dims(extents, 1), in_three_dims(padding, 0)
    depth, height, width = sizes
    rows = (depth * height * width * channels, height * width * channels, width * channels)
    found = (strides[0], *in_three_dims(strides[2:], rows[1]), strides[1])
    wanted = zip((samples, *sizes, channels), found, (*rows, channels, 1), strict=True)
    if any(size > 1 and stride != right for size, stride, right in wanted):
        return None
    d, h, w = (
        n + 2 * pad - k + 1
        for n, pad, k in zip(sizes, pads, in_three_dims(weights[2:], 1), strict=True)
    )
    return Geometry(samples, sizes, rows, pads, (d, h, w), len(shape), has_room=False)


@lru_cache(maxsize=1024)
def _copied(
    shape: torch.Size,
    strides: tuple[int, ...],
    weights: torch.Size,
    padding: tuple[int, ...],
    device: torch.device,
) -> tuple[Geometry, int, Launch]:
    """Where the copy of an ``x`` lies, how many numbers its memory has, and what writes them."""
    from hyperslab.kernels.gpu.few_channels import pack_kernel

    conv = Shape.of(weights, 0)
    samples, channels, *others = shape
    extents, pads = in_three_dims(others, 1), in_three_dims(padding, 0)
    depth, height, width = (n + 2 * pad for n, pad in zip(extents, pads, strict=True))
    d, h, w = (n - k + 1 for n, k in zip((depth, height, width), conv.kernel, strict=True))
    aligned = -(-width // 8) * 8
    row = aligned * conv.slots
    steps = (depth * height * row, height * row, row)
    geometry = Geometry(
        samples, (depth, height, aligned), steps, (0, 0, 0), (d, h, w), len(shape), has_room=True
    )
    room = MAX_GROUPS * conv.group * conv.slots + conv.row
    num_rows = samples * depth * height + -(-room // row)
    block = min(256, power_of_two(aligned))
    launch = Launch(
        pack_kernel,
        (num_rows, -(-aligned // block)),
        device,
        (
            *strides[:2], *in_three_dims(strides[2:], 0), samples, channels, *extents, *pads,
            depth, height, aligned,
        ),
        {"CHANNELS": conv.slots, "BLOCK": block},
    )  # fmt: skip
    return geometry, num_rows * row, launch
