"""What the Triton kernels of activation and pool share.

To them a tensor is a stack of rows: samples (times channels, where these come first) of ``depth``
planes of ``height`` rows of ``width`` cells, and a cell is ``channels`` numbers side by side (one
where channels come first). Offsets of rows are 64-bit, those inside a row 32-bit. A block is
``cols`` cells of a row by ``lanes`` of their channels.

Kernels are not specialized on SIZES. Where ``num_cols`` is known to be 1, LLVM computes numbers of
cells in 16 bits, two at a time, and ptxas (12.8, 12.9) loses the constant of such an addition when
it repeats it: gradients of other windows are read, and no error tells.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = [*("depth", "height", "out_depth", "out_height"), *("num_chunks", "num_groups", "num_cols")]
"""What kernels are compiled once for, whatever the value."""


@triton.jit
def program_place(num_lanes: tl.constexpr, num_cols, num_groups, num_chunks):
    """Sample, chunk of planes, group of rows, block of columns, block of channels."""
    number = tl.program_id(0)
    lane = number % num_lanes
    number = number // num_lanes
    col = number % num_cols
    number = number // num_cols
    group = number % num_groups
    number = number // num_groups
    return (number // num_chunks).to(tl.int64), number % num_chunks, group, col, lane


@triton.jit
def activated(x, slope: tl.constexpr):
    if slope == 1:
        return x
    if slope == 0:  # not x * 0: that of an infinity is not a number
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if (slope > 0) and (slope < 1):  # takes fewer registers than a choice
        return tl.maximum(x, x * slope)
    return tl.where(x > 0, x, x * slope)


@triton.jit
def replaced(values, place: tl.constexpr, value):
    """The tuple ``values`` with ``value`` in one place."""
    return values[:place] + (value,) + values[place + 1 :]


@triton.jit
def num_in_bounds(
    window, extent, kernel: tl.constexpr, stride: tl.constexpr,
    padding: tl.constexpr,
):  # fmt: skip
    """How many of the indices that ``window`` holds are not padding."""
    start = window * stride - padding
    return tl.minimum(start + kernel, extent) - tl.maximum(start, 0)


@triton.jit
def packed(bits, cols: tl.constexpr, lanes: tl.constexpr):
    """A block of booleans, eight in a byte."""
    eight = tl.reshape(bits.to(tl.int32), (cols * lanes // 8, 8))
    return tl.sum(eight << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def unpacked(numbers, cols: tl.constexpr, lanes: tl.constexpr):
    """The block that ``packed`` made ``numbers`` of."""
    bits = (numbers.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
    return tl.reshape(bits, (cols, lanes)) != 0


@triton.jit
def byte_places(cols: tl.constexpr, lanes: tl.constexpr):
    """Cell and channel, in its block, of the first bit of each of the block's bytes."""
    bit = tl.arange(0, cols * lanes // 8) * 8
    return bit // lanes, bit % lanes


@triton.jit
def store_gradients(
    out, grads, sample, td, th, col, lane, depth, height, width,
    channels: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    """Writes a block for each of ``stride`` rows of each of ``stride`` planes of y."""
    sd: tl.constexpr = stride[0]
    sh: tl.constexpr = stride[1]
    w = col * cols + tl.arange(0, cols)[:, None]
    c = lane * lanes + tl.arange(0, lanes)[None, :]
    for rd in tl.static_range(sd):
        for rh in tl.static_range(sh):
            plane, row = td * sd - padding[0] + rd, th * sh - padding[1] + rh
            start = out + ((sample * depth + plane) * height + row) * width * channels
            inside = (plane >= 0) & (plane < depth) & (row >= 0) & (row < height)
            inside = inside & (w < width) & (c < channels)
            tl.store(start + (w * channels + c), grads[rd * sh + rh], mask=inside)
