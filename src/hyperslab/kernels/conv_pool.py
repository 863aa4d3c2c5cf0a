"""A convolution with few input channels, its activation and the pool after it, in one.

Nothing of the size of the convolution's output is written, forward or backward, but its signs (a
bit for each number, before average pools).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hyperslab.kernels import few_channels
from hyperslab.kernels.act_pool_plan import Pool, Triple
from hyperslab.kernels.few_channels_operands import (
    Geometry,
    Halo,
    Packed,
    Shape,
    gather_grads,
    lay_out,
    packed_copy,
)
from hyperslab.kernels.fused import turns
from hyperslab.kernels.memory_format import RowsBeside, channels_last

MIN_NUMEL = 1 << 27
"""Of the convolution's outputs: with fewer, one kernel was not faster than two."""
MAX_PLANE = 2**31
"""Numbers in a plane, whose offsets are 32-bit."""
WORD = 16
"""Filters whose signs, for two outputs, are one 32-bit number."""


class Tuning(NamedTuple):
    """How the work is cut."""

    groups: int = 64
    """Of the convolution's outputs, along the width, in a block."""
    rows: int = 16
    """Of the pool, that a program goes down."""
    planes: int = 16
    """Of the pool, that a program of the forward pass goes through."""
    at_once: int = 1
    """Planes of the convolution, in the forward pass."""
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    """That a thread may have; None leaves it to the compiler."""
    programs_per_sm: int = 4
    """Of the backward pass."""

    def options(self, shape: Shape) -> dict[str, int]:
        """Options of the Triton compiler. A block twice as wide gets twice as many warps."""
        wide = shape.group * shape.block_f > 32 or shape.kernel[1] > 3
        found = {"num_warps": self.warps * (2 if wide else 1), "num_stages": self.stages}
        return found | ({"maxnreg": self.registers} if self.registers else {})


# Each was the fastest of those tried on the first layer of CosmoFlow.
FORWARD = {"avg": Tuning(rows=32, registers=128), "max": Tuning(at_once=2)}
BACKWARD = Tuning(rows=32, stages=1, registers=168, programs_per_sm=3)
MOST_PLANES = 65535
"""That CUDA can number, in the second dim of a grid."""
PROGRAMS = 528
"""That a device runs at the same time."""
MOST_HALVED = 3
"""How many sizes of blocks are considered, each with half the rows of the one before."""


def is_supported(
    shape: Sequence[int], weight: Tensor, padding: tuple[int, ...], slope: float, pool: Pool
) -> bool:
    """Whether there is a kernel, where ``few_channels`` has one for the convolution alone.

    ``shape`` is that of the inputs, which get no gradient.
    """
    return (
        weight.dtype in few_channels.DTYPES
        and slope >= 0
        and len(pool.kernel) == weight.ndim - 2
        and all(map(_fits, pool.kernel, pool.stride, pool.padding))
        and pool.stride[-1] == 2
        and pool.padding[-1] == pool.kernel[-1] - 2
        and (pool.count_include_pad or not any(_leads(pool)))
        and _has_outputs(shape, weight, padding, pool)
        and _has_room(weight, FORWARD[pool.mode])
    )


def pays(shape: Sequence[int], weight: Tensor, padding: tuple[int, ...]) -> bool:
    """Whether the convolution's output is so large that it is better never written."""
    sizes = _conv_sizes(shape, weight, padding)
    return shape[0] * weight.shape[0] * math.prod(sizes) >= MIN_NUMEL


def _conv_sizes(shape: Sequence[int], weight: Tensor, padding: tuple[int, ...]) -> list[int]:
    dims = zip(shape[2:], weight.shape[2:], padding, strict=True)
    return [n + 2 * p - k + 1 for n, k, p in dims]


def _has_outputs(
    shape: Sequence[int], weight: Tensor, padding: tuple[int, ...], pool: Pool
) -> bool:
    """Whether there are outputs, in not too many planes, which 32-bit offsets can address."""
    sizes = _conv_sizes(shape, weight, padding)
    if shape[0] * math.prod(sizes[:-2]) > MOST_PLANES:
        return False
    height, width = (n + k for n, k in zip(sizes[-2:], weight.shape[-2:], strict=True))
    channels = 2 * max(shape[1], weight.shape[0], WORD)
    is_small = (width + 8) * height * channels < MAX_PLANE
    return min(sizes) > 0 and is_small and min(pool.output_shape((shape[0], 1, *sizes))) > 0


def _fits(kernel: int, stride: int, padding: int) -> bool:
    """Whether each window holds its stride, and at most the last of the stride before."""
    is_known = stride in (1, 2) and kernel in (stride, stride + 1)
    return is_known and padding in (0, kernel - stride)


def _leads(pool: Pool) -> list[int]:
    """How many of the convolution's outputs come before those that the pool's first output owns."""
    dims = zip(pool.kernel, pool.stride, pool.padding, strict=True)
    return [kernel - stride - padding for kernel, stride, padding in dims]


def _has_room(weight: Tensor, tuning: Tuning) -> bool:
    shape = Shape.of(weight.shape, 16)
    _, height, blocks, rows, columns = shape.layout
    inputs = tuning.stages * 2 * tuning.groups * (blocks + tuning.at_once) * rows
    numbers = height * blocks * rows * columns + inputs
    return numbers * weight.itemsize <= few_channels.MAX_SHARED_BYTES


def conv_and_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, ...],
    slope: float,
    pool: Pool,
    halo: Halo | None = None,
    rows: RowsBeside = (0, 0),
) -> Tensor:
    """The pool of the convolution of ``x`` after its activation, channels last.

    ``x`` may have another dtype than ``weight`` and gets no gradient, nor does the ``halo`` around
    it. Convolution and pool are in float32 and rounded once. One sample's pool has ``rows`` of
    memory beside it. Differentiable once; deterministic.
    """
    keeps = torch.is_grad_enabled() and (
        weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    out: Tensor = _ConvPool.apply(x, weight, bias, padding, slope, pool, halo, rows, keeps)  # type: ignore[no-untyped-call]
    return out


class _ConvPool(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, ...],
        slope: float,
        pool: Pool,
        halo: Halo | None,
        rows: RowsBeside,
        keeps: bool,
    ) -> Tensor:
        packed = packed_copy(x, weight, padding, halo)
        sizes = _Sizes.of(packed.geometry, weight, slope, pool)
        out, kept = _forward(packed, weight, bias, sizes, rows, keeps=keeps)
        if keeps:
            ctx.save_for_backward(weight, packed.memory, kept)
            ctx.sizes, ctx.geometry = sizes, packed.geometry
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, memory, kept = ctx.saved_tensors
        packed = Packed(memory, ctx.geometry)
        want_bias = ctx.needs_input_grad[2]
        grads = _backward(packed, grad, kept, weight, ctx.sizes, want_bias=want_bias)
        return None, *grads, None, None, None, None, None, None


class _Sizes(NamedTuple):
    """A pool over a convolution's outputs, as the kernels see it: in three dims."""

    samples: int
    extents: Triple
    outputs: Triple
    tiles: int
    """Blocks of filters."""
    words: int
    """How many 32-bit words the signs of a pair of outputs take."""
    constants: dict[str, Any]

    @classmethod
    def of(cls, geometry: Geometry, weight: Tensor, slope: float, pool: Pool) -> _Sizes:
        flat = (1,) * (3 - len(pool.kernel))
        kernel, stride = flat + pool.kernel, flat + pool.stride
        extents = geometry.extents
        sizes = extents[len(flat) :]
        d, h, w = flat + pool.output_shape((1, 1, *sizes))[2:]
        before = (0,) * len(flat) + tuple(_leads(pool))
        shape = Shape.of(weight.shape, 16)
        tiles = shape.layout[0]
        constants = {
            "MAXIMUM": pool.mode == "max", "KERNEL": kernel, "STRIDE": stride,
            "COUNTS": pool.count_include_pad, "BEFORE": before[:2], "SLOPE": slope,
            "PRECISION": "tf32",
        }  # fmt: skip
        words = tiles * (shape.block_f // WORD)
        return cls(geometry.samples, extents, (d, h, w), tiles, words, constants)

    def empty_kept(self, filters: int, device: torch.device) -> Tensor | None:
        """Room for the places of maxima, or for the signs of all outputs of the convolution."""
        depth, height, _ = self.extents
        if self.constants["MAXIMUM"]:
            numel = self.samples * self.outputs[0] * self.outputs[1] * self.outputs[2] * filters
            return torch.empty(numel, dtype=torch.uint8, device=device)
        if self.constants["SLOPE"] == 1:
            return None
        numel = self.samples * depth * height * self.outputs[2] * self.words
        return torch.empty(numel, dtype=torch.int32, device=device)


def _forward(
    packed: Packed,
    weight: Tensor,
    bias: Tensor | None,
    sizes: _Sizes,
    beside: RowsBeside,
    *,
    keeps: bool,
) -> tuple[Tensor, Tensor | None]:
    from hyperslab.kernels.gpu.conv_pool import conv_pool_kernel

    tuning = FORWARD["max" if sizes.constants["MAXIMUM"] else "avg"]
    shape = Shape.of(weight.shape, 16)
    out = packed.empty(shape.filters, sizes.outputs, beside)
    kept = sizes.empty_kept(shape.filters, weight.device) if keeps else None
    depth = sizes.outputs[0]
    kernel, stride = sizes.constants["KERNEL"], sizes.constants["STRIDE"]
    rows, planes, across = _forward_cut(shape, sizes.samples, sizes.outputs, kernel, stride, tuning)
    grid = (across, sizes.samples * -(-depth // planes), sizes.tiles)
    at_once = min(tuning.at_once, stride[0])
    block = rows * tuning.groups * shape.group // 2 * shape.block_f
    sums, places = _carried(math.prod(grid) * block, sizes, at_once, weight.device)
    conv_pool_kernel[grid](
        packed.memory, lay_out(weight, shape), bias, out, kept, sums, places,
        *packed.geometry.strides, *sizes.extents, *sizes.outputs, shape.filters, rows, planes,
        **shape.constants, **sizes.constants, BLOCK_Q=tuning.groups, AT_ONCE=at_once,
        HAS_BIAS=bias is not None, **tuning.options(shape),
    )  # fmt: skip
    return out, kept


@lru_cache(maxsize=1024)
def _forward_cut(
    shape: Shape, samples: int, outputs: Triple, kernel: Triple, stride: Triple, tuning: Tuning
) -> tuple[int, int, int]:
    """Rows and planes that a program pools, and how many programs there are across a plane.

    The fewer it pools, the more it convolves besides: what windows share with those before. The
    more, the less do programs fill the device to the last.
    """
    depth, height, width = outputs
    tiles, pairs = shape.layout[0], shape.group // 2
    lead = tuple(k - s for k, s in zip(kernel, stride, strict=True))
    warm_up = -(-(shape.kernel[1] - 1 + lead[1]) // stride[1])
    best: tuple[float, int, int, int] | None = None
    for fewer in range(MOST_HALVED):
        rows = min(max(1, tuning.rows >> fewer), height)
        columns = -(-width // pairs) * -(-height // rows)
        across = -(-columns // (tuning.groups - lead[2]))
        for planes in range(1, min(tuning.planes, depth) + 1):
            programs = across * tiles * samples * -(-depth // planes)
            work = (planes * stride[0] + lead[0]) * (rows + warm_up)
            found = (turns(programs, PROGRAMS) * work, -rows, -planes, across)
            best = found if best is None else min(best, found)
    assert best is not None
    return -best[1], -best[2], best[3]


def _carried(
    numel: int, sizes: _Sizes, at_once: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Room for what programs hold from one plane to the next."""
    if sizes.constants["KERNEL"][0] <= at_once:
        return None, None
    sums = torch.empty(numel, device=device)
    if not sizes.constants["MAXIMUM"]:
        return sums, None
    return sums, torch.empty(numel, dtype=torch.uint8, device=device)


def _backward_cut(
    shape: Shape, samples: int, extents: Triple, outputs: Triple, most: int
) -> tuple[int, int]:
    """Rows of the pool in a share of the work, and how many programs take shares."""
    pairs = BACKWARD.groups * shape.group // 2
    across = samples * extents[0] * -(-outputs[2] // pairs)
    sizes = [min(max(1, BACKWARD.rows >> fewer), outputs[1]) for fewer in range(MOST_HALVED)]
    return few_channels.cut_shares(
        [(rows, across * -(-outputs[1] // rows)) for rows in sizes], shape.kernel[1] - 1, most
    )


def _backward(
    packed: Packed,
    grad: Tensor,
    kept: Tensor | None,
    weight: Tensor,
    sizes: _Sizes,
    *,
    want_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    from hyperslab.kernels.gpu.conv_pool_grad import conv_pool_grad_kernel

    shape = Shape.of(weight.shape, 64 if weight.shape[-2] < 5 else 32)
    grad = grad.to(weight.dtype).contiguous(memory_format=channels_last(grad.ndim))
    tiles = sizes.tiles
    most = few_channels.num_programs(weight.device, BACKWARD.programs_per_sm)
    rows, programs = _backward_cut(shape, sizes.samples, sizes.extents, sizes.outputs, most)
    sums = torch.empty((tiles, programs, *shape.layout[1:]), device=weight.device)
    bias_sums = torch.empty((tiles, programs, shape.block_f), device=weight.device)
    conv_pool_grad_kernel[(programs, tiles * shape.layout[2])](
        packed.memory, grad, kept, sums, bias_sums, *packed.geometry.strides,
        sizes.samples, *sizes.extents, *sizes.outputs, shape.filters, tiles, rows,
        **shape.constants, **sizes.constants, BLOCK_Q=BACKWARD.groups, HAS_BIAS=want_bias,
        **BACKWARD.options(shape),
    )  # fmt: skip
    bias_grad = None
    if want_bias:
        bias_grad = bias_sums.sum(1).flatten()[: shape.filters].to(weight.dtype)
    return gather_grads(sums, shape, weight), bias_grad
