"""Convolutions with few input channels, faster than cuDNN's (``gpu.few_channels`` says how)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hyperslab.kernels.few_channels_operands import (
    Geometry,
    Packed,
    Shape,
    gather_grads,
    lay_out,
    pack,
)
from hyperslab.kernels.fused import Launch, power_of_two, turns
from hyperslab.kernels.memory_format import channels_last

MAX_CHANNELS = 32
MAX_FILTERS = 64
"""With more, kernels were not compared with cuDNN's."""
MAX_SHARED_BYTES = 200 << 10
"""Of a program's shared memory: on GPUs that have less, Triton refuses larger kernels."""
KERNELS = (1, 3, 5)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tuning(NamedTuple):
    """How the work is cut."""

    groups: int = 64
    """Of outputs, along the width, in a block."""
    rows: int = 128
    """That a program goes down."""
    warps: int = 4
    stages: int = 2
    at_once: int = 16
    """Numbers of a group's window that are multiplied at once, at least."""

    @property
    def options(self) -> dict[str, int]:
        """Options of the Triton compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# Each was the fastest of those tried, by the bytes that a group of outputs reads of one row.
FORWARD = {
    32: Tuning(stages=1),
    64: Tuning(stages=4, rows=64),
    128: Tuning(groups=32, stages=4),
    1 << 30: Tuning(groups=32, warps=2),
}
BACKWARD = {32: Tuning(groups=32, stages=4, at_once=64), 1 << 30: Tuning(groups=32, stages=4)}
MIN_ROWS = 8
BUSY = 4
"""Programs that keep a processor of the device busy: with fewer, each goes down fewer rows."""


def _tuned(table: dict[int, Tuning], sizes: tuple[int, ...], dtype: torch.dtype) -> Tuning:
    row_bytes = Shape.of(sizes, 0).row * dtype.itemsize
    return next(tuning for limit, tuning in table.items() if row_bytes <= limit)


def is_supported(weight: Tensor, dtype: torch.dtype, steps: tuple[int, ...], groups: int) -> bool:
    """Whether there are kernels that convolve with ``weight`` in ``dtype``.

    ``steps`` are strides and dilations.
    """
    return groups == 1 and dtype in DTYPES and _are_supported(weight.shape, dtype, steps)


@lru_cache(maxsize=1024)
def _are_supported(sizes: torch.Size, dtype: torch.dtype, steps: tuple[int, ...]) -> bool:
    return (
        len(sizes) in (4, 5)
        and sizes[1] <= MAX_CHANNELS
        and all(extent in KERNELS for extent in sizes[2:])
        and all(step == 1 for step in steps)
        and _fit_shared_memory(sizes, dtype)
    )


def has_short_planes(x: Tensor, weight: Tensor) -> bool:
    """Whether the planes of a window, with their padding, lie within 32-bit offsets."""
    height, width = (n + 2 * k for n, k in zip(x.shape[-2:], weight.shape[-2:], strict=True))
    depth = weight.shape[2] if weight.ndim == 5 else 1
    return depth * height * (width + 8) * power_of_two(x.shape[1]) < 2**31


def is_faster(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether convolutions in ``dtype`` were measured to be faster than cuDNN's.

    ``benchmarks/gpu_channels.py`` tells them apart.
    """
    filters, channels, *kernel = weight.shape
    most = max(filters, channels)
    if min(filters, channels) > 16 or most > MAX_FILTERS or math.prod(kernel) == 1:
        return False
    return dtype != torch.float32 or channels <= 8 or most <= (32 if len(kernel) == 2 else 16)


def is_weight_grad_faster(weight: Tensor, dtype: torch.dtype) -> bool:
    """The same of gradients of weights, which may be faster where convolutions are not."""
    filters, channels, *kernel = weight.shape
    is_narrow = filters <= MAX_FILTERS and channels <= MAX_CHANNELS and math.prod(kernel) > 1
    return (is_narrow and dtype != torch.float32) or is_faster(weight, dtype)


def _fit_shared_memory(sizes: torch.Size, dtype: torch.dtype) -> bool:
    """Whether weights, and rows of inputs and gradients that are being read, fit there."""
    tuning = _tuned(FORWARD, sizes, dtype)
    _, height, blocks, rows, columns = Shape.of(sizes, tuning.at_once).layout
    forward = height * blocks * rows * columns + tuning.stages * tuning.groups * blocks * rows
    tuning = _tuned(BACKWARD, sizes, dtype)
    _, height, _, rows, columns = _backward_shape(sizes, tuning).layout
    backward = tuning.stages * tuning.groups * (rows + height * columns)
    return max(forward, backward) * dtype.itemsize <= MAX_SHARED_BYTES


def _backward_shape(sizes: torch.Size, tuning: Tuning) -> Shape:
    return Shape.of(sizes, tuning.at_once // (1 if sizes[-2] < 5 else 2))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...], slope: float = 1.0
) -> tuple[Tensor, Packed]:
    """The convolution, channels last, of ``x``, which may have another dtype; and ``x`` packed.

    Outputs below zero are multiplied by ``slope``, which is not negative.
    """
    packed = pack(x, weight, padding)
    return _convolve(packed, weight, bias, slope), packed


def input_grad(grad: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    """The gradient of the input; padding must be less than the kernel."""
    pads = tuple([k - 1 - pad for k, pad in zip(weight.shape[2:], padding, strict=True)])
    packed = pack(grad, weight.transpose(0, 1), pads)
    return _convolve(packed, weight, None, 1.0, turned=True)


def _convolve(
    packed: Packed, weight: Tensor, bias: Tensor | None, slope: float, *, turned: bool = False
) -> Tensor:
    sizes = (weight.shape[1], weight.shape[0], *weight.shape[2:]) if turned else weight.shape
    tuning = _tuned(FORWARD, sizes, weight.dtype)
    shape = Shape.of(sizes, tuning.at_once)
    out = packed.empty(shape.filters, packed.geometry.extents)
    launch = _conv_launch(packed.geometry, shape, tuning, slope, bias is not None, weight.device)
    launch(packed.memory, lay_out(weight, shape, turned=turned), bias, out)
    return out


@lru_cache(maxsize=1024)
def _conv_launch(
    geometry: Geometry,
    shape: Shape,
    tuning: Tuning,
    slope: float,
    has_bias: bool,
    device: torch.device,
) -> Launch:
    from hyperslab.kernels.gpu.few_channels import conv_kernel

    _, height, width = geometry.extents
    across = -(-width // (shape.group * tuning.groups)) * shape.layout[0]
    rows = _rows(geometry, across, tuning, shape.kernel[1], device)
    return Launch(
        conv_kernel,
        (geometry.num_planes, -(-height // rows), across),
        device,
        (*geometry.numbers, *geometry.extents, shape.filters, rows),
        {
            **shape.constants, "BLOCK_Q": tuning.groups, "HAS_BIAS": has_bias, "SLOPE": slope,
            "PRECISION": "tf32", "MASKED": not geometry.has_room,
        },
        tuning.options,
    )  # fmt: skip


def weight_grads(
    packed: Packed,
    grad: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    slope: float = 1.0,
    *,
    want_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """Those of weight and bias; a ``slope`` other than 1 was applied to give ``out``."""
    tuning = _tuned(BACKWARD, weight.shape, weight.dtype)
    shape = _backward_shape(weight.shape, tuning)
    last = channels_last(grad.ndim)
    grad = grad.to(weight.dtype).contiguous(memory_format=last)
    out = grad if out is None else out.contiguous(memory_format=last)
    rows, programs = _grad_cut(packed.geometry, shape, tuning, weight.device)
    tiles, columns = shape.layout[0], shape.layout[-1]
    sums = torch.empty((tiles, programs, *shape.layout[1:]), device=weight.device)
    bias_sums = sums
    if want_bias:
        bias_sums = torch.empty((tiles, programs, columns), device=weight.device)
    launch = _grad_launch(
        packed.geometry, shape, tuning, slope, want_bias, rows, programs, weight.device
    )
    launch(packed.memory, grad, out, sums, bias_sums)
    bias_grad = None
    if want_bias:
        per_filter = bias_sums.sum(1).view(tiles, shape.group, shape.block_f).sum(1)
        bias_grad = per_filter.flatten()[: shape.filters].to(weight.dtype)
    return gather_grads(sums, shape, weight), bias_grad


@lru_cache(maxsize=1024)
def _grad_launch(
    geometry: Geometry,
    shape: Shape,
    tuning: Tuning,
    slope: float,
    want_bias: bool,
    rows: int,
    programs: int,
    device: torch.device,
) -> Launch:
    from hyperslab.kernels.gpu.few_channels import weight_grad_kernel

    return Launch(
        weight_grad_kernel,
        (programs, shape.layout[0] * shape.layout[2]),
        device,
        (*geometry.numbers, geometry.num_planes, *geometry.extents, shape.filters, rows),
        {
            **shape.constants, "BLOCK_Q": tuning.groups, "HAS_BIAS": want_bias, "SLOPE": slope,
            "PRECISION": "tf32", "MASKED": not geometry.has_room, "CARRIED": slope != 1,
        },
        tuning.options,
    )  # fmt: skip


def _rows(
    geometry: Geometry, across: int, tuning: Tuning, kernel: int, device: torch.device
) -> int:
    """How many rows a program goes down.

    It reads ``kernel - 1`` more. Programs take turns: the more there are, the less do the last ones
    leave the device idle.
    """
    at_once, height = num_programs(device), geometry.extents[1]

    def cost(rows: int) -> float:
        programs = geometry.num_planes * across * -(-height // rows)
        return turns(programs, at_once) * (rows + kernel - 1)

    return min(_halved(tuning.rows), key=cost)


def _halved(rows: int) -> list[int]:
    """``rows`` and halves of it, down to the least that a program goes down."""
    found = [rows]
    while found[-1] > MIN_ROWS:
        found.append(found[-1] // 2)
    return found


@lru_cache(maxsize=1024)
def _grad_cut(
    geometry: Geometry, shape: Shape, tuning: Tuning, device: torch.device
) -> tuple[int, int]:
    """Rows in a share of the work, and how many programs take shares for each block of weights."""
    _, height, width = geometry.extents
    across = geometry.num_planes * -(-width // (shape.group * tuning.groups))
    blocks = shape.layout[0] * shape.layout[2]
    most = max(1, min(blocks, 2) * num_programs(device) // blocks)
    shares = [(rows, across * -(-height // rows)) for rows in _halved(tuning.rows)]
    return cut_shares(shares, shape.kernel[1] - 1, most)


def cut_shares(shares: Sequence[tuple[int, int]], more: int, most: int) -> tuple[int, int]:
    """The best of some rows in a share, each with the number of shares, and how many programs.

    There are ``most`` programs, or fewer where these are as fast: what each has summed is written,
    and summed again. A share costs its rows and ``more``.
    """

    def cost(share: tuple[int, int]) -> int:
        rows, num = share
        return -(-num // most) * (rows + more)

    rows, num = min(shares, key=cost)
    return rows, -(-num // -(-num // most))


@lru_cache
def num_programs(device: torch.device, per_processor: int = BUSY) -> int:
    """How many programs a kernel has, with ``per_processor`` on each processor of the device."""
    if device.type != "cuda":  # Triton's interpreter
        return 3
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count
