"""The Triton kernel of a convolution with few input channels, an activation and a pool in one.

The convolution is that of ``few_channels``. A pool's window holds LEAD = kernel - stride (0 or 1)
of the outputs that are the previous window's own, and its own: output ``t`` owns ``t * stride``
and as many after it as the stride says. Along the width the stride is 2, and a group of outputs is
one pair or two. So a pool is a sum of what pairs own, and of the last of the pair before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.act_pool import activated
from hyperslab.kernels.gpu.pool_parts import (
    WORD,
    load_part,
    merged,
    moved,
    no_parts,
    num_in_window,
    of_pair_before,
    packed_signs,
    row_parts,
    store_part,
    words_at,
)

SIZES = ["depth", "height", "width", "out_depth", "out_height", "out_width", "rows", "planes"]


@triton.jit(do_not_specialize=SIZES)
def conv_pool_kernel(
    packed, weights, bias, out, kept, sums, places,
    x_n, x_d, x_h, depth, height, width,
    out_depth, out_height, out_width, filters, rows, planes,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr,
    MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COUNTS: tl.constexpr,
    BEFORE: tl.constexpr, AT_ONCE: tl.constexpr, HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Pools ``planes`` planes of ``rows`` rows in BLOCK_Q columns, a column a group of outputs.

    Columns are numbered along the width and on through the next ``rows`` rows. Blocks overlap by a
    column where windows do. A program goes down the height for AT_ONCE planes of the convolution,
    then for the next; meanwhile ``sums`` (and ``places``) hold the pools that want more planes.
    Of the convolution's planes and rows, BEFORE come before those that the first outputs own: they
    have negative numbers.
    """
    N: tl.constexpr = GROUP * BLOCK_F
    PAIRS: tl.constexpr = GROUP // 2
    BLOCK_P: tl.constexpr = BLOCK_Q * PAIRS
    LEAD_D: tl.constexpr = KERNEL[0] - STRIDE[0]
    LEAD_H: tl.constexpr = KERNEL[1] - STRIDE[1]
    LEAD_W: tl.constexpr = KERNEL[2] - STRIDE[2]
    STEP_D: tl.constexpr = STRIDE[0]
    STEP_H: tl.constexpr = STRIDE[1]
    IN_BLOCK: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + IN_BLOCK - 1) // IN_BLOCK
    PARTS: tl.constexpr = AT_ONCE * (1 + LEAD_W)
    WARM_UP: tl.constexpr = (KERNEL_H - 1 + LEAD_H + STEP_H - 1) // STEP_H
    CARRIES: tl.constexpr = (LEAD_D > 0) or (STEP_D > AT_ONCE)

    tile = tl.program_id(2)
    per_row = tl.cdiv(out_width, PAIRS)
    num_columns = tl.cdiv(out_height, rows) * per_row
    column = tl.program_id(0) * (BLOCK_Q - LEAD_W) - LEAD_W
    q, h0 = _grid_place(column + tl.arange(0, BLOCK_Q), num_columns, per_row, rows)
    place = tl.arange(0, BLOCK_P)
    column = column + place // PAIRS
    mine = (place >= LEAD_W * PAIRS) & (column < num_columns)
    group, row0 = _grid_place(column, num_columns, per_row, rows)
    pair = (group * PAIRS + place % PAIRS)[:, None]
    row0 = row0[:, None]
    mine = mine[:, None] & (pair < out_width)
    f = (tile * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]

    kernels = _load_kernels(weights, tile, KERNEL_H * BLOCKS, BLOCK_K, N)
    if HAS_BIAS:
        shift = _load_bias(bias, tile, filters, N, BLOCK_F)
    deep = tl.cdiv(out_depth, planes)
    sample = (tl.program_id(1) // deep).to(tl.int64)
    od0 = tl.program_id(1) % deep * planes
    od1 = min(od0 + planes, out_depth)
    packed += sample * x_n
    k = tl.arange(0, BLOCK_K)
    window = q[:, None] * (GROUP * CHANNELS) + (k // ROW * x_d + k % ROW)[None, :]
    held = place[:, None] * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    if CARRIES:
        sums += _program() * rows * (BLOCK_P * BLOCK_F)
        if MAXIMUM:
            places += _program() * rows * (BLOCK_P * BLOCK_F)
    if BEFORE[0]:
        first = od0 * STEP_D // AT_ONCE - LEAD_D
    else:
        first = od0 * STEP_D // AT_ONCE - (LEAD_D if od0 > 0 else 0)
    for step in range(first, od1 * STEP_D // AT_ONCE):
        d = step * AT_ONCE
        od = (d + STEP_D) // STEP_D - 1  # d may be negative
        phase = (d + STEP_D) % STEP_D
        is_last = (d + AT_ONCE) % STEP_D == 0
        if (kept is not None) and (not MAXIMUM):
            sign_plane = height * out_width * tl.num_programs(2) * (BLOCK_F // WORD)
            signs = kept + (sample * depth + d + BEFORE[0]) * sign_plane
        unfinished = ()  # the rows above, as far as they are summed
        for _ in tl.static_range(AT_ONCE * (KERNEL_H - 1)):
            unfinished = unfinished + (tl.zeros((BLOCK_Q, N), tl.float32),)
        new = no_parts(PARTS, BLOCK_P, BLOCK_F, MAXIMUM)
        for s in range(-WARM_UP, rows):
            if LEAD_H:
                pooled = new  # the last row of the window above, of each plane
            else:
                pooled = no_parts(PARTS, BLOCK_P, BLOCK_F, MAXIMUM)
            for i in tl.static_range(STEP_H):
                r = (h0 + s) * STEP_H + (i + KERNEL_H - 1 + BEFORE[1])
                r = tl.minimum(tl.maximum(r, 0), height + KERNEL_H - 2)
                inputs = _load_inputs(
                    packed, window + r[:, None] * x_h, d + BEFORE[0], depth, x_d,
                    KERNEL_D, ROW, BLOCK_K, AT_ONCE,
                )  # fmt: skip
                ended, unfinished = _convolved(
                    inputs, kernels, unfinished, KERNEL_H, AT_ONCE, PRECISION
                )
                row = (row0 + s) * STEP_H + i
                new = ()
                for j in tl.static_range(AT_ONCE):
                    y = ended[j]
                    if HAS_BIAS:
                        y += shift
                    if not MAXIMUM:
                        y = activated(y, SLOPE)
                    y0, y1 = tl.split(tl.permute(tl.reshape(y, (BLOCK_P, 2, BLOCK_F)), (0, 2, 1)))
                    there = (row >= -BEFORE[1]) & (row < height - BEFORE[1])
                    there = there & (d + j >= -BEFORE[0]) & (d + j < depth - BEFORE[0])
                    if (kept is not None) and (not MAXIMUM):
                        pairs = (row + BEFORE[1]) * out_width + pair
                        to = words_at(pairs, tile, tl.num_programs(2), BLOCK_F)
                        wanted = there & mine & ((s >= 0) | ((row < 0) & (row0 == 0)))
                        wanted = wanted & ((d >= od0 * STEP_D) | (od0 == 0))
                        tl.store(signs + j * sign_plane + to, packed_signs(y0, y1), mask=wanted)
                    new = new + row_parts(
                        y0, y1, there, there & (2 * pair + 1 < width), LEAD_W, MAXIMUM
                    )
                pooled = merged(pooled, moved(new, (LEAD_H + i) * KERNEL[2], MAXIMUM), MAXIMUM)
            total, plane_above = _over_planes(pooled, pair, phase, KERNEL, STRIDE, AT_ONCE, MAXIMUM)
            if CARRIES:
                hold = s * (BLOCK_P * BLOCK_F) + held
                wants = (step > first) & ((phase != 0) | (LEAD_D > 0))
                total = merged(load_part(sums, places, hold, wants, MAXIMUM), total, MAXIMUM)
                store_part(sums, places, hold, is_last, plane_above, total, MAXIMUM)
            oh = row0 + s
            wanted = mine & (f < filters) & (oh < out_height) & (s >= 0) & is_last & (od >= od0)
            to = (oh * out_width + pair) * filters + f
            plane = (sample * out_depth + od) * out_height * out_width * filters
            if MAXIMUM:
                _store_maxima(out, kept, plane, to, total, wanted, SLOPE)
            else:
                if COUNTS:
                    mean = total[0] * (1.0 / (KERNEL[0] * KERNEL[1] * KERNEL[2]))
                else:
                    num = num_in_window(od, oh, pair, depth, height, width, KERNEL, STRIDE)
                    mean = total[0] / num
                tl.store(out + plane + to, mean.to(out.dtype.element_ty), mask=wanted)
        if CARRIES:
            tl.debug_barrier()


@triton.jit
def _grid_place(column, num_columns, per_row, rows):
    """Where columns are along the width, and the first of their rows."""
    column = tl.minimum(tl.maximum(column, 0), num_columns - 1)
    return column % per_row, column // per_row * rows


@triton.jit
def _program():
    """The number of this program."""
    number = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    return number * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def _load_kernels(weights, tile, NUM: tl.constexpr, BLOCK_K: tl.constexpr, N: tl.constexpr):
    """The matrices that rows of inputs are multiplied by, for a block of filters."""
    weights += tile * (NUM * BLOCK_K * N)
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, N)
    kernels = ()
    for b in tl.static_range(NUM):
        kernels = kernels + (tl.load(weights + (b * BLOCK_K + k)[:, None] * N + n[None, :]),)
    return kernels


@triton.jit
def _load_bias(bias, tile, filters, N: tl.constexpr, BLOCK_F: tl.constexpr):
    of = tile * BLOCK_F + tl.arange(0, N) % BLOCK_F
    return tl.load(bias + of, mask=of < filters, other=0).to(tl.float32)[None, :]


@triton.jit
def _load_inputs(
    packed, window, d, depth, x_d,
    KERNEL_D: tl.constexpr, ROW: tl.constexpr, BLOCK_K: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A row of inputs of AT_ONCE planes from ``d`` on, numbered from 0, in blocks.

    Where a block is one plane of inputs, planes share them: the first is that of plane ``d``.
    """
    IN_BLOCK: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + IN_BLOCK - 1) // IN_BLOCK
    SHARED: tl.constexpr = IN_BLOCK == 1
    inputs = ()
    for b in tl.static_range(KERNEL_D + AT_ONCE - 1 if SHARED else AT_ONCE * BLOCKS):
        if SHARED:
            depth_at = tl.minimum(tl.maximum(d + b, 0), depth + KERNEL_D - 2)
        else:
            plane = tl.minimum(tl.maximum(d + b // BLOCKS, 0), depth - 1)
            depth_at = plane + b % BLOCKS * IN_BLOCK
        source = packed + depth_at.to(tl.int64) * x_d + window
        if KERNEL_D % IN_BLOCK == 0:
            inputs = inputs + (tl.load(source),)
        else:
            there = b % BLOCKS * IN_BLOCK + tl.arange(0, BLOCK_K) // ROW < KERNEL_D
            inputs = inputs + (tl.load(source, mask=there[None, :], other=0),)
    return inputs


@triton.jit
def _convolved(
    inputs, kernels, unfinished,
    KERNEL_H: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows that end with these inputs, one for each plane, and those that want more.

    ``unfinished`` has KERNEL_H - 1 rows for each plane, the first of which ends.
    """
    BLOCKS: tl.constexpr = len(kernels) // KERNEL_H
    SHARED: tl.constexpr = len(inputs) == BLOCKS + AT_ONCE - 1
    begun = ()
    ended = ()
    for j in tl.static_range(AT_ONCE):
        for m in tl.static_range(KERNEL_H):
            if m < KERNEL_H - 1:
                total = unfinished[j * (KERNEL_H - 1) + m]
            else:
                total = tl.zeros((inputs[0].shape[0], kernels[0].shape[1]), tl.float32)
            for b in tl.static_range(BLOCKS):
                total = tl.dot(
                    inputs[j + b if SHARED else j * BLOCKS + b],
                    kernels[(KERNEL_H - 1 - m) * BLOCKS + b],
                    total, input_precision=PRECISION,
                )  # fmt: skip
            if m == 0:
                ended = ended + (total,)
            else:
                begun = begun + (total,)
    return ended, begun


@triton.jit
def _over_planes(
    pooled, pair, d,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """The part of planes ``d`` and on of a window, and that of the last plane alone."""
    PART: tl.constexpr = 2 if MAXIMUM else 1
    CELL: tl.constexpr = PART * (1 + KERNEL[2] - STRIDE[2])
    total = ()
    for j in tl.static_range(AT_ONCE):
        part = pooled[j * CELL : j * CELL + PART]
        if CELL > PART:
            seconds = pooled[j * CELL + PART : j * CELL + CELL]
            part = merged(part, of_pair_before(seconds, pair, MAXIMUM), MAXIMUM)
        here = (KERNEL[0] - STRIDE[0] + d + j) * (KERNEL[1] * KERNEL[2])
        if j == 0:
            total = moved(part, here, MAXIMUM)
        else:
            total = merged(total, moved(part, here, MAXIMUM), MAXIMUM)
    return total, part


@triton.jit
def _store_maxima(out, kept, plane, to, part, wanted, SLOPE: tl.constexpr):
    """Stores activated maxima, and their places: plus 128 where they were not positive."""
    value, place = part[0], part[1]
    if kept is not None:
        if SLOPE != 1:
            place = tl.where(value > 0, place, place + 128)
        tl.store(kept + plane + to, place.to(tl.uint8), mask=wanted)
    tl.store(out + plane + to, activated(value, SLOPE).to(out.dtype.element_ty), mask=wanted)
