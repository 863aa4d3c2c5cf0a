"""Convolutions with few input channels, faster than cuDNN's (``gpu.few_channels`` says how)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels.memory import empty_channels_last

MAX_CHANNELS = 32
MAX_SHARED_BYTES = 200 << 10
"""Of a program's shared memory: on GPUs that have less, Triton refuses larger kernels."""
MIN_CHANNELS_UNPACKED = 8
"""With fewer, rows begin where memory cannot be read in whole sectors."""
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


# Each was the fastest of those tried, by the bytes that a group of outputs reads of one row.
FORWARD = {
    32: Tuning(stages=1),
    64: Tuning(stages=4, rows=64),
    128: Tuning(groups=32, stages=4),
    1 << 30: Tuning(groups=32, warps=2),
}
BACKWARD = {
    32: Tuning(groups=32, stages=4, at_once=64),
    1 << 30: Tuning(groups=32, stages=4),
}
MAX_GROUPS = 64
"""Of all tunings."""
MIN_ROWS = 8
BUSY = 4
"""Programs that keep a processor of the device busy: with fewer, each goes down fewer rows."""


def _tuned(table: dict[int, Tuning], weight: Tensor, dtype: torch.dtype) -> Tuning:
    row_bytes = _shape(weight, at_once=0).row * dtype.itemsize
    return next(tuning for limit, tuning in table.items() if row_bytes <= limit)


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

    @property
    def slots(self) -> int:
        """Channels a voxel has room for."""
        return _power_of_two(self.channels)

    @property
    def group(self) -> int:
        return max(2, self.kernel[2] - 1)

    @property
    def row(self) -> int:
        """The numbers that a group of outputs reads of one row: a power of two."""
        return (self.kernel[2] - 1 + self.group) * self.slots

    @property
    def block_f(self) -> int:
        return min(_power_of_two(max(16, self.filters)), 64 // self.group)

    @property
    def layout(self) -> tuple[int, int, int, int, int]:
        """Of the weights: blocks of filters, height, blocks of depth, a block's two dims."""
        planes = self.block_k // self.row
        blocks = -(-self.kernel[0] // planes)
        tiles = -(-self.filters // self.block_f)
        return (tiles, self.kernel[1], blocks, self.block_k, self.group * self.block_f)

    def forward_numbers(self, tuning: Tuning) -> int:
        """What a program keeps in shared memory: weights, and rows of inputs on their way."""
        _, height, blocks, rows, columns = self.layout
        return height * blocks * rows * columns + tuning.stages * tuning.groups * blocks * rows

    def backward_numbers(self, tuning: Tuning) -> int:
        """What a program keeps there: rows of inputs and of gradients on their way."""
        _, height, _, rows, columns = self.layout
        return tuning.stages * tuning.groups * (rows + height * columns)

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


def _power_of_two(number: int) -> int:
    """The smallest that is not less than ``number``."""
    return 1 << (number - 1).bit_length()


def _shape(weight: Tensor, *, at_once: int) -> Shape:
    """The shape whose blocks hold one plane of the kernel, or as many as ``at_once`` numbers do."""
    filters, channels, *flat, height, width = weight.shape
    whole = (flat[0] if flat else 1, height, width)
    one = Shape(filters, channels, whole, 0)
    block_k = max(16, one.row, min(at_once, _power_of_two(whole[0] * one.row)))
    return Shape(filters, channels, whole, block_k)


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


def is_supported(weight: Tensor, dtype: torch.dtype, steps: tuple[int, ...], groups: int) -> bool:
    """Whether there are kernels that convolve with ``weight`` in ``dtype``.

    ``steps`` are strides and dilations.
    """
    return (
        groups == 1
        and dtype in DTYPES
        and weight.ndim in (4, 5)
        and weight.shape[1] <= MAX_CHANNELS
        and all(extent in KERNELS for extent in weight.shape[2:])
        and all(step == 1 for step in steps)
        and _fits_shared_memory(weight, dtype)
    )


def is_faster(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether convolutions in ``dtype`` were measured to be faster than cuDNN's.

    ``benchmarks/gpu_channels.py`` tells them apart.
    """
    filters, channels, *kernel = weight.shape
    if len(kernel) == 2 or dtype == torch.float32:
        fewest = max(filters, channels)
    else:
        fewest = min(filters, channels)
    return fewest <= 16 and math.prod(kernel) > 1


def _fits_shared_memory(weight: Tensor, dtype: torch.dtype) -> bool:
    forward, backward = _tuned(FORWARD, weight, dtype), _tuned(BACKWARD, weight, dtype)
    numbers = max(
        _shape(weight, at_once=forward.at_once).forward_numbers(forward),
        _backward_shape(weight, backward).backward_numbers(backward),
    )
    return numbers * dtype.itemsize <= MAX_SHARED_BYTES


def _backward_shape(weight: Tensor, tuning: Tuning) -> Shape:
    return _shape(weight, at_once=tuning.at_once // (1 if weight.shape[-2] < 5 else 2))


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...], slope: float = 1.0
) -> tuple[Tensor, Packed]:
    """The convolution, channels last, of ``x``, which may have another dtype; and ``x`` packed.

    Outputs below zero are multiplied by ``slope``, which is not negative.
    """
    packed = pack(x, weight, padding)
    return _convolve(packed, weight, bias, slope), packed


def pack(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
    """``x`` as kernels read it, copied only where it must be."""
    return Packed.seen_in(x, weight, padding) or Packed.of(x, weight, padding)


def turned(weight: Tensor) -> Tensor:
    """The weights with which gradients of outputs are convolved to those of inputs."""
    return weight.detach().flip(*range(2, weight.ndim)).transpose(0, 1)


def input_grad(grad: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    """The gradient of the input; padding must be less than the kernel."""
    pads = tuple(k - 1 - pad for k, pad in zip(weight.shape[2:], padding, strict=True))
    return convolve(grad, turned(weight), None, pads)[0]


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
    has_room: bool = True
    """Whether kernels may read beyond the end of rows."""

    @classmethod
    def seen_in(cls, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed | None:
        """``x`` as it is, if that is how kernels can read it."""
        whole = x.unsqueeze(2) if x.ndim == 4 else x
        rows = whole.movedim(1, -1)
        channels = rows.shape[-1]
        if (
            x.dtype != weight.dtype
            or channels != _power_of_two(channels)
            or channels < MIN_CHANNELS_UNPACKED
            or not rows.is_contiguous()
        ):
            return None
        pads = (0,) * (5 - x.ndim) + padding
        kernel = (1,) * (5 - x.ndim) + tuple(weight.shape[2:])
        d, h, w = (e + 2 * p - k + 1 for e, p, k in zip(rows.shape[1:4], pads, kernel, strict=True))
        return cls(rows, (d, h, w), x.ndim, (pads[0], pads[1], pads[2]), has_room=False)

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
        from hyperslab.kernels.gpu.few_channels import pack_kernel

        shape = _shape(weight, at_once=0)
        pads = (0,) * (5 - x.ndim) + padding
        whole = x.unsqueeze(2) if x.ndim == 4 else x
        n, channels, *extents = whole.shape
        depth, height, width = (e + 2 * p for e, p in zip(extents, pads, strict=True))
        aligned = -(-width // 8) * 8
        room = MAX_GROUPS * shape.group * shape.slots + shape.row
        numel = n * depth * height * aligned * shape.slots
        flat = torch.empty(numel + room, dtype=weight.dtype, device=x.device)
        flat[numel:] = 0
        block = min(256, _power_of_two(aligned))
        pack_kernel[(n * depth * height, -(-aligned // block))](
            whole, flat, *whole.stride(), channels, *extents, *pads, depth, height, aligned,
            CHANNELS=shape.slots, BLOCK=block,
        )  # fmt: skip
        data = flat[:numel].view(n, depth, height, aligned, shape.slots)
        outputs = [e - k + 1 for e, k in zip((depth, height, width), shape.kernel, strict=True)]
        return cls(data, (outputs[0], outputs[1], outputs[2]), x.ndim)

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


def _convolve(packed: Packed, weight: Tensor, bias: Tensor | None, slope: float) -> Tensor:
    from hyperslab.kernels.gpu.few_channels import conv_kernel

    tuning = _tuned(FORWARD, weight, weight.dtype)
    shape = _shape(weight, at_once=tuning.at_once)
    out = packed.outputs(shape.filters)
    _, height, width = packed.extents
    across = -(-width // (shape.group * tuning.groups)) * shape.layout[0]
    rows = _rows(packed, across, tuning)
    conv_kernel[(packed.num_planes, -(-height // rows), across)](
        packed.data, lay_out(weight, shape), bias, out,
        *packed.place, *packed.extents, shape.filters, rows,
        **shape.constants, BLOCK_Q=tuning.groups, HAS_BIAS=bias is not None, SLOPE=slope,
        PRECISION="tf32", MASKED=not packed.has_room,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    return out


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
    from hyperslab.kernels.gpu.few_channels import weight_grad_kernel

    tuning = _tuned(BACKWARD, weight, weight.dtype)
    shape = _backward_shape(weight, tuning)
    last = torch.channels_last if grad.ndim == 4 else torch.channels_last_3d
    grad = grad.to(weight.dtype).contiguous(memory_format=last)
    tiles, columns = shape.layout[0], shape.layout[-1]
    programs = _num_programs(weight.device)
    across = -(-packed.extents[2] // (shape.group * tuning.groups))
    rows = _rows(packed, across, tuning)
    sums = torch.empty((tiles, programs, *shape.layout[1:]), device=weight.device)
    bias_sums = torch.empty((tiles, programs, columns) if want_bias else 0, device=weight.device)
    weight_grad_kernel[(programs, tiles * shape.layout[2])](
        packed.data, grad, grad if out is None else out, sums, bias_sums,
        *packed.place, packed.num_planes, *packed.extents, shape.filters, rows,
        **shape.constants, BLOCK_Q=tuning.groups, HAS_BIAS=want_bias, SLOPE=slope,
        PRECISION="tf32", MASKED=not packed.has_room, CARRIED=slope != 1,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    bias_grad = None
    if want_bias:
        per_filter = bias_sums.sum(1).view(tiles, shape.group, shape.block_f).sum(1)
        bias_grad = per_filter.flatten()[: shape.filters].to(weight.dtype)
    return gather_grads(sums.sum(1), shape, weight), bias_grad


def _rows(packed: Packed, across: int, tuning: Tuning) -> int:
    """How many rows a program goes down."""
    rows, height = tuning.rows, packed.extents[1]
    wanted = _num_programs(packed.data.device)
    while rows > MIN_ROWS and packed.num_planes * across * -(-height // rows) < wanted:
        rows //= 2
    return rows


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 3
    return BUSY * torch.cuda.get_device_properties(device).multi_processor_count
