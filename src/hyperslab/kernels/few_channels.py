"""Convolutions with few input channels, faster than cuDNN's (``gpu.few_channels`` says how)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

MAX_CHANNELS = 16
MAX_SHARED_BYTES = 200 << 10
"""Of a program's shared memory: on GPUs that have less, Triton refuses larger kernels."""
KERNELS = (1, 3, 5)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tuning(NamedTuple):
    """How the work is cut; each was the fastest of those tried."""

    groups: int = 64
    """Of outputs, along the width, in a block."""
    rows: int = 32
    """That a program goes down."""
    warps: int = 4
    stages: int = 2


FORWARD = Tuning()
BACKWARD = Tuning()
PROGRAMS_PER_SM = 4


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

    def shared_bytes(self, dtype: torch.dtype) -> int:
        """What a program of the forward pass keeps: weights, and rows of inputs on their way."""
        _, height, blocks, rows, columns = self.layout
        inputs = FORWARD.stages * FORWARD.groups * blocks * rows
        return (height * blocks * rows * columns + inputs) * dtype.itemsize

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


def is_supported(
    x: Tensor, weight: Tensor, dtype: torch.dtype, steps: tuple[int, ...], groups: int
) -> bool:
    """Whether there are kernels that convolve ``x``, which must want no gradient, in ``dtype``.

    ``steps`` are strides and dilations.
    """
    return (
        groups == 1
        and dtype in DTYPES
        and not x.requires_grad
        and x.ndim == weight.ndim
        and weight.shape[1] <= MAX_CHANNELS
        and all(extent in KERNELS for extent in weight.shape[2:])
        and all(step == 1 for step in steps)
        and _shape(weight, at_once=16).shared_bytes(dtype) <= MAX_SHARED_BYTES
    )


def conv_few_channels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    padding: tuple[int, ...] = (0, 0, 0),
    *,
    slope: float = 1.0,
) -> Tensor:
    """The convolution of ``x``, which may have another dtype than ``weight``, channels last.

    Outputs below zero are multiplied by ``slope``, which is not negative.
    """
    out: Tensor = _FewChannels.apply(x, weight, bias, padding, slope)  # type: ignore[no-untyped-call]
    return out


class _FewChannels(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, ...],
        slope: float,
    ) -> Tensor:
        packed = Packed.of(x, weight, padding)
        out = _convolve(packed, weight, bias, slope)
        ctx.extents, ctx.ndim, ctx.slope = packed.extents, packed.ndim, slope
        ctx.save_for_backward(weight, packed.data, *([out] if slope != 1 else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, data, *out = ctx.saved_tensors
        packed = Packed(data, ctx.extents, ctx.ndim)
        want_bias = ctx.needs_input_grad[2]
        grads = _weight_grads(packed, grad, weight, ctx.slope, out, want_bias=want_bias)
        return None, *grads, None, None


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

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Packed:
        from hyperslab.kernels.gpu.few_channels import pack_kernel

        shape = _shape(weight, at_once=0)
        pads = (0,) * (5 - x.ndim) + padding
        whole = x.unsqueeze(2) if x.ndim == 4 else x
        n, channels, *extents = whole.shape
        depth, height, width = (e + 2 * p for e, p in zip(extents, pads, strict=True))
        aligned = -(-width // 8) * 8
        room = (FORWARD.groups + BACKWARD.groups) * shape.group * shape.slots + shape.row
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
        out = self.data.new_empty((self.data.shape[0], *self.extents, filters))
        out = out.movedim(-1, 1)
        return out.squeeze(2) if self.ndim == 4 else out

    @property
    def num_planes(self) -> int:
        """Of outputs, in all samples."""
        return self.data.shape[0] * self.extents[0]


def _convolve(packed: Packed, weight: Tensor, bias: Tensor | None, slope: float) -> Tensor:
    from hyperslab.kernels.gpu.few_channels import conv_kernel

    shape = _shape(weight, at_once=16)
    out = packed.outputs(shape.filters)
    _, height, width = packed.extents
    across = -(-width // (shape.group * FORWARD.groups)) * shape.layout[0]
    conv_kernel[(packed.num_planes, -(-height // FORWARD.rows), across)](
        packed.data, lay_out(weight, shape), bias, out,
        *packed.data.stride()[:3], *packed.extents, shape.filters, FORWARD.rows,
        **shape.constants, BLOCK_Q=FORWARD.groups, HAS_BIAS=bias is not None,
        SLOPE=slope, PRECISION="tf32", num_warps=FORWARD.warps, num_stages=FORWARD.stages,
    )  # fmt: skip
    return out


def _weight_grads(
    packed: Packed,
    grad: Tensor,
    weight: Tensor,
    slope: float,
    out: list[Tensor],
    *,
    want_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    from hyperslab.kernels.gpu.few_channels import weight_grad_kernel

    shape = _shape(weight, at_once=64 if weight.shape[-2] < 5 else 32)
    last = torch.channels_last if grad.ndim == 4 else torch.channels_last_3d
    grad = grad.to(weight.dtype).contiguous(memory_format=last)
    tiles, columns = shape.layout[0], shape.layout[-1]
    programs = _num_programs(weight.device)
    sums = torch.empty((tiles, programs, *shape.layout[1:]), device=weight.device)
    bias_sums = torch.empty((tiles, programs, columns) if want_bias else 0, device=weight.device)
    weight_grad_kernel[(programs, tiles * shape.layout[2])](
        packed.data, grad, out[0] if out else grad, sums, bias_sums,
        *packed.data.stride()[:3], packed.num_planes, *packed.extents, shape.filters, BACKWARD.rows,
        **shape.constants, BLOCK_Q=BACKWARD.groups, HAS_BIAS=want_bias, SLOPE=slope,
        PRECISION="tf32", num_warps=BACKWARD.warps, num_stages=BACKWARD.stages,
    )  # fmt: skip
    bias_grad = None
    if want_bias:
        per_filter = bias_sums.sum(1).view(tiles, shape.group, shape.block_f).sum(1)
        bias_grad = per_filter.flatten()[: shape.filters].to(weight.dtype)
    return gather_grads(sums.sum(1), shape, weight), bias_grad


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 3
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
