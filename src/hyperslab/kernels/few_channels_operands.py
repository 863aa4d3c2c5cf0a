"""Weights and inputs of convolutions with few input channels, in memory as kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hyperslab.kernels import faces
from hyperslab.kernels.fused import Launch, power_of_two
from hyperslab.kernels.memory_format import RowsBeside, empty_channels_last, empty_with_rows
from hyperslab.layout import Assembly, Piece


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
def _lay_out(shape: Shape, strides: tuple[int, ...], device: torch.device, turned: bool) -> Launch:
    from hyperslab.kernels.gpu.few_channels_operands import lay_out_kernel

    numel = math.prod(shape.layout)
    first, second, *others = strides
    ends = (second, first) if turned else (first, second)
    numbers = (shape.filters, shape.channels, *ends, *in_three_dims(others, 0), numel)
    constants = {**shape.constants, "BLOCK": LAID_AT_ONCE, "TURNED": turned}
    return Launch(lay_out_kernel, (-(-numel // LAID_AT_ONCE),), device, numbers, constants)


@lru_cache(maxsize=1024)
def _gather(shape: Shape, programs: int, strides: tuple[int, ...], device: torch.device) -> Launch:
    from hyperslab.kernels.gpu.few_channels_operands import gather_kernel

    grid = (shape.channels, math.prod(shape.kernel), shape.layout[0])
    numbers = (programs, shape.filters, *strides[:2], *in_three_dims(strides[2:], 0))
    constants = {**shape.constants, "AT_ONCE": GATHERED_AT_ONCE}
    return Launch(gather_kernel, grid, device, numbers, constants)


def in_three_dims(sizes: Sequence[int], missing: int) -> tuple[int, int, int]:
    """Depth, height and width of ``sizes``; ``missing`` is the depth where there are two dims."""
    depth, height, width = (missing,) * (3 - len(sizes)) + tuple(sizes)
    return depth, height, width


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
        """Strides, sizes and padding, in the order of the kernels' parameters."""
        return (*self.strides, *self.sizes, *self.pads)

    @property
    def num_planes(self) -> int:
        """How many planes of outputs there are, in all samples."""
        return self.samples * self.extents[0]


class Packed(NamedTuple):
    """Inputs as kernels read them."""

    memory: Tensor
    geometry: Geometry

    def empty(self, channels: int, extents: Triple, rows: RowsBeside = (0, 0)) -> Tensor:
        """An uninitialised tensor, channels last, with as many dims as the inputs.

        One sample has ``rows`` of memory beside it.
        """
        samples, memory = self.geometry.samples, self.memory
        shape = (samples, channels, *extents[5 - self.geometry.ndim :])
        if any(rows) and samples == 1:
            return empty_with_rows(shape, rows, memory.dtype, memory.device)
        return empty_channels_last(shape, memory)


def pack(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
    """``x`` as kernels read it, copied only where it must be."""
    if x.dtype == weight.dtype:
        geometry = _seen_in(x.shape, x.stride(), weight.shape, padding)
        if geometry is not None:
            return Packed(x, geometry)
    return packed_copy(x, weight, padding)


class Halo(NamedTuple):
    """What lies around a tensor in a window: boxes, and zeros elsewhere."""

    lengths: tuple[tuple[int, int], ...]
    """Of the window before and after the tensor, along each spatial dim."""
    places: tuple[tuple[slice, ...], ...]
    """Where boxes lie in the window."""
    boxes: Sequence[Tensor]


def packed_copy(
    x: Tensor, weight: Tensor, padding: tuple[int, ...], halo: Halo | None = None
) -> Packed:
    """``x``, and what is around it, in the dtype of ``weight``, padded and with room behind."""
    ends = tuple([(pad, pad) for pad in padding])
    if halo is not None:
        ends = tuple(
            [(a + pad, b + pad) for (a, b), (pad, _) in zip(halo.lengths, ends, strict=True)]
        )
    geometry, numel, launch = _copied(x.shape, x.stride(), weight.shape, ends, x.device)
    memory = torch.empty(numel, dtype=weight.dtype, device=x.device)
    launch(x, memory)
    if halo is not None:
        _add_boxes(memory, geometry, halo, padding)
    return Packed(memory, geometry)


def _add_boxes(memory: Tensor, geometry: Geometry, halo: Halo, padding: tuple[int, ...]) -> None:
    """Writes the boxes of ``halo`` into what ``packed_copy`` has packed."""
    first, *steps = geometry.strides
    slots = steps[1] // geometry.sizes[2]
    sizes, num_dims = geometry.sizes[5 - geometry.ndim :], geometry.ndim - 2
    strides = (first, 1, *(*steps, slots)[3 - num_dims :])
    rows = memory.as_strided((geometry.samples, slots, *sizes), strides)
    pieces = [
        Piece(number, _whole(box.shape), 0, _padded(place, box.shape[1], padding))
        for number, (place, box) in enumerate(zip(halo.places, halo.boxes, strict=True))
    ]
    if pieces:
        received = tuple([tuple(box.shape) for box in halo.boxes])
        boxes = Assembly((tuple(rows.shape),), tuple(pieces), received)
        faces.place_(rows, halo.boxes, boxes)


def _whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple([slice(0, size) for size in shape])


def _padded(place: tuple[slice, ...], channels: int, padding: tuple[int, ...]) -> tuple[slice, ...]:
    samples, _, *others = place
    at = [slice(s.start + pad, s.stop + pad) for s, pad in zip(others, padding, strict=True)]
    return (samples, slice(0, channels), *at)


@lru_cache(maxsize=1024)
def _seen_in(
    shape: torch.Size, strides: tuple[int, ...], weights: torch.Size, padding: tuple[int, ...]
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
    ends: tuple[tuple[int, int], ...],
    device: torch.device,
) -> tuple[Geometry, int, Launch]:
    """Where the copy of an ``x`` lies, how many numbers its memory has, and what writes them.

    ``ends`` are the zeros before and after it along each spatial dim.
    """
    from hyperslab.kernels.gpu.few_channels import pack_kernel

    conv = Shape.of(weights, 0)
    samples, channels, *others = shape
    extents, pads = in_three_dims(others, 1), in_three_dims([start for start, _ in ends], 0)
    after = in_three_dims([end for _, end in ends], 0)
    depth, height, width = (sum(sizes) for sizes in zip(extents, pads, after, strict=True))
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
