"""Triton kernels of convolutions with few input channels.

With few channels cuDNN is far from the memory limit. Here a row of inputs, channels last, is read
as overlapping windows: GROUP neighbouring outputs along the width read ROW = (kernel - 1 + GROUP) *
CHANNELS numbers that lie side by side, a whole operand of the tensor cores. The weights are laid
out for that (``few_channels``), with zeros where an output does not read a number of its window. A
program goes down the height: a row of inputs is loaded once and serves the kernel's whole height.
Inputs come packed with their padding, so that loads need no masks, or, where MASKED, as
they are.

Inputs are ``x[sample, depth, height, width * channel]``, outputs lie channels last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.act_pool import activated

EXTENTS = ("depth", "height", "width", "pad_d", "pad_h", "pad_w", "rows")
"""Compiled once for all of their values: alignment does not depend on them."""


@triton.jit(do_not_specialize=["samples", "padded_depth", "padded_height", *EXTENTS[:-1]])
def pack_kernel(
    x, packed, x_n, x_c, x_d, x_h, x_w,
    samples, channels, depth, height, width, pad_d, pad_h, pad_w,
    padded_depth, padded_height, padded_width,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a row of ``x``, of any strides and dtype, channels last and with zeros around it.

    Rows after the last are zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, CHANNELS)[None, :]
    h = row % padded_height - pad_h
    d = row // padded_height % padded_depth - pad_d
    n = row // padded_height // padded_depth
    w = slot - pad_w
    there = (n < samples) & (d >= 0) & (d < depth) & (h >= 0) & (h < height)
    inside = there & (w >= 0) & (w < width) & (c < channels)
    source = x + n * x_n + d * x_d + h * x_h + (c.to(tl.int64) * x_c + w.to(tl.int64) * x_w)
    values = tl.load(source, mask=inside, other=0)
    target = packed + row * padded_width * CHANNELS + (slot * CHANNELS + c)
    tl.store(target, values.to(packed.dtype.element_ty), mask=slot < padded_width)


@triton.jit
def columns_inside(
    q, k, width, pad_w, ROW: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr
):
    """Whether number ``k`` of the window of group ``q`` is no padding along the width."""
    column = q[:, None] * GROUP + (k % ROW // CHANNELS)[None, :] - pad_w
    return (column >= 0) & (column < width)


@triton.jit(do_not_specialize=["x_depth", "x_height", "x_width", *EXTENTS])
def conv_kernel(
    x, weights, bias, out, x_n, x_d, x_h,
    x_depth, x_height, x_width, pad_d, pad_h, pad_w,
    depth, height, width, filters, rows,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Convolution, bias and activation of ``rows`` rows of BLOCK_Q groups of outputs."""
    N: tl.constexpr = GROUP * BLOCK_F
    PLANES: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + PLANES - 1) // PLANES
    tiles = tl.cdiv(filters, BLOCK_F)
    plane = tl.program_id(0).to(tl.int64)
    h0 = tl.program_id(1) * rows
    q = tl.program_id(2) // tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    tile = tl.program_id(2) % tiles
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, N)
    f = tile * BLOCK_F + n % BLOCK_F
    w = q[:, None] * GROUP + (n // BLOCK_F)[None, :]

    weights += tile * (KERNEL_H * BLOCKS * BLOCK_K * N)
    kernels = ()
    for b in tl.static_range(KERNEL_H * BLOCKS):
        kernels = kernels + (tl.load(weights + (b * BLOCK_K + k)[:, None] * N + n[None, :]),)
    if HAS_BIAS:
        shift = tl.load(bias + f, mask=f < filters, other=0).to(tl.float32)[None, :]

    window = x + plane // depth * x_n + (plane % depth - pad_d) * x_d
    window = window + (h0 - pad_h).to(tl.int64) * x_h - pad_w * CHANNELS
    window = window + q[:, None] * (GROUP * CHANNELS) + (k // ROW * x_d + k % ROW)[None, :]
    columns = columns_inside(q, k, x_width, pad_w, ROW, GROUP, CHANNELS)
    target = out + (plane * height + h0 - (KERNEL_H - 1)) * width * filters
    target = target + (w * filters + f[None, :])
    wanted = (w < width) & (f < filters)[None, :]
    unfinished = ()  # the rows above, as far as they are summed
    for _ in tl.static_range(KERNEL_H - 1):
        unfinished = unfinished + (tl.zeros((BLOCK_Q, N), tl.float32),)
    for r in range(h0, min(h0 + rows, height) + KERNEL_H - 1):
        inputs = ()
        for b in tl.static_range(BLOCKS):
            part = window + b * PLANES * x_d
            there = (b * PLANES + k // ROW < KERNEL_D)[None, :]
            if MASKED:
                d = (plane % depth).to(tl.int32) + b * PLANES + k // ROW - pad_d
                there = there & ((d >= 0) & (d < x_depth))[None, :] & columns
                there = there & (r >= pad_h) & (r < x_height + pad_h)
            if MASKED or KERNEL_D % PLANES != 0:
                inputs = inputs + (tl.load(part, mask=there, other=0),)
            else:
                inputs = inputs + (tl.load(part),)
        unfinished = unfinished + (tl.zeros((BLOCK_Q, N), tl.float32),)
        sums = ()
        for j in tl.static_range(KERNEL_H):  # row r is number KERNEL_H - 1 - j of output row j
            total = unfinished[j]
            for b in tl.static_range(BLOCKS):
                kernel = kernels[(KERNEL_H - 1 - j) * BLOCKS + b]
                total = tl.dot(inputs[b], kernel, total, input_precision=PRECISION)
            sums = sums + (total,)
        done = sums[0]
        if HAS_BIAS:
            done += shift
        done = activated(done, SLOPE)
        mine = wanted & (r >= h0 + KERNEL_H - 1)
        tl.store(target, done.to(out.dtype.element_ty), mask=mine)
        unfinished = sums[1:]
        window += x_h
        target += width * filters


@triton.jit(do_not_specialize=["x_depth", "x_height", "x_width", "planes", *EXTENTS])
def weight_grad_kernel(
    x, grads, out, sums, bias_sums, x_n, x_d, x_h,
    x_depth, x_height, x_width, pad_d, pad_h, pad_w,
    planes, depth, height, width, filters, rows,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    CARRIED: tl.constexpr,
):  # fmt: skip
    """Each program's sums of the gradients of weights and bias over its share of the outputs.

    It has one block of filters and one block of the kernel's planes.
    """
    N: tl.constexpr = GROUP * BLOCK_F
    PLANES: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + PLANES - 1) // PLANES
    tile = tl.program_id(1) // BLOCKS
    block = tl.program_id(1) % BLOCKS
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, N)
    f = (tile * BLOCK_F + n % BLOCK_F)[None, :]
    there = (block * PLANES + k // ROW < KERNEL_D)[None, :]
    totals = ()
    for _ in tl.static_range(KERNEL_H):
        totals = totals + (tl.zeros((BLOCK_K, N), tl.float32),)
    bias_total = tl.zeros((BLOCK_Q, N), tl.float32)
    across = tl.cdiv(width, GROUP * BLOCK_Q)
    down = tl.cdiv(height, rows)
    for share in range(tl.program_id(0), planes * down * across, tl.num_programs(0)):
        q = share % across * BLOCK_Q + tl.arange(0, BLOCK_Q)
        h0 = share // across % down * rows
        h1 = min(h0 + rows, height)
        plane = (share // across // down).to(tl.int64)
        w = q[:, None] * GROUP + (n // BLOCK_F)[None, :]
        wanted = (w < width) & (f < filters)
        first = plane % depth + block * PLANES - pad_d
        window = x + plane // depth * x_n + first * x_d
        window = window + (h0 - pad_h).to(tl.int64) * x_h - pad_w * CHANNELS
        window = window + q[:, None] * (GROUP * CHANNELS) + (k // ROW * x_d + k % ROW)[None, :]
        inside = there
        if MASKED:
            d = first.to(tl.int32) + k // ROW
            inside = inside & ((d >= 0) & (d < x_depth))[None, :]
            inside = inside & columns_inside(q, k, x_width, pad_w, ROW, GROUP, CHANNELS)
        place = (plane * height + h0) * width * filters + (w * filters + f)
        above = ()  # the gradients of the rows above
        for _ in tl.static_range(KERNEL_H - 1):
            above = above + (tl.zeros((BLOCK_Q, N), x.dtype.element_ty),)
        for r in range(h0, h1 + KERNEL_H - 1):
            if CARRIED or HAS_BIAS:
                mine = wanted & (r < h1)
                grad = tl.load(grads + place, mask=mine, other=0).to(tl.float32)
                if SLOPE != 1:
                    value = tl.load(out + place, mask=mine, other=0)
                    grad = tl.where(value > 0, grad, grad * SLOPE if SLOPE != 0 else 0.0)
                if HAS_BIAS:
                    bias_total += grad
            if CARRIED:
                above = above + (grad.to(x.dtype.element_ty),)
            if MASKED:
                read = inside & (r >= pad_h) & (r < x_height + pad_h)
            else:
                read = there
            inputs = tl.trans(tl.load(window, mask=read, other=0))
            new = ()
            for j in tl.static_range(KERNEL_H):  # row r is number KERNEL_H - 1 - j of output row j
                if CARRIED:
                    row = above[j]
                else:
                    mine = wanted & (r >= h0 + KERNEL_H - 1 - j) & (r < h1 + KERNEL_H - 1 - j)
                    at = place - (KERNEL_H - 1 - j) * width * filters
                    row = tl.load(grads + at, mask=mine, other=0)
                new = new + (tl.dot(inputs, row, totals[j], input_precision=PRECISION),)
            totals = new
            if CARRIED:
                above = above[1:]
            window += x_h
            place += width * filters
    number = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    for j in tl.static_range(KERNEL_H):
        target = (number * KERNEL_H + KERNEL_H - 1 - j) * BLOCKS + block
        tl.store(sums + (target * BLOCK_K + k[:, None]) * N + n[None, :], totals[j])
    if HAS_BIAS:
        tl.store(bias_sums + number * N + n, tl.sum(bias_total, 0), mask=block == 0)
