"""The gradients of weights and bias through a pool and an activation: see ``conv_pool``."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.pool_parts import num_in_window, scaled_by_signs, words_at

SIZES = ["depth", "height", "width", "out_depth", "out_height", "out_width", "rows"]


@triton.jit(do_not_specialize=["samples", "tiles", *SIZES])
def conv_pool_grad_kernel(
    packed, grads, kept, sums, bias_sums,
    x_n, x_d, x_h, samples, depth, height, width,
    out_depth, out_height, out_width, filters, tiles, rows,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr,
    MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COUNTS: tl.constexpr,
    BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program's sums of the gradients of weights and bias over its share of the outputs.

    It has one block of filters and one block of the kernel's planes. Planes and rows BEFORE those
    that the first outputs own have negative numbers.
    """
    N: tl.constexpr = GROUP * BLOCK_F
    PAIRS: tl.constexpr = GROUP // 2
    BLOCK_P: tl.constexpr = BLOCK_Q * PAIRS
    IN_BLOCK: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + IN_BLOCK - 1) // IN_BLOCK
    STEP_D: tl.constexpr = STRIDE[0]
    STEP_H: tl.constexpr = STRIDE[1]
    TAIL: tl.constexpr = (KERNEL_H - 1 + STEP_H - 1) // STEP_H
    tile = tl.program_id(1) // BLOCKS
    block = tl.program_id(1) % BLOCKS
    k = tl.arange(0, BLOCK_K)
    f = (tile * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    there = (block * IN_BLOCK + k // ROW < KERNEL_D)[None, :]
    totals = ()
    for _ in tl.static_range(KERNEL_H):
        totals = totals + (tl.zeros((BLOCK_K, N), tl.float32),)
    bias_total = tl.zeros((BLOCK_P, BLOCK_F), tl.float32)
    across = tl.cdiv(out_width, BLOCK_P)
    down = tl.cdiv(out_height, rows)
    deep = min(out_depth * STEP_D + BEFORE[0], depth)
    for share in range(tl.program_id(0), samples * deep * down * across, tl.num_programs(0)):
        q = share % across * BLOCK_Q + tl.arange(0, BLOCK_Q)
        pair = (share % across * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
        oh0 = share // across % down * rows
        oh1 = min(oh0 + rows, out_height)
        plane = share // across // down % deep
        d = plane - BEFORE[0]
        sample = (share // across // down // deep).to(tl.int64)
        window = packed + sample * x_n + (plane + block * IN_BLOCK).to(tl.int64) * x_d
        window = window + q[:, None] * (GROUP * CHANNELS) + (k // ROW * x_d + k % ROW)[None, :]
        above = ()  # the gradients of the rows above
        for _ in tl.static_range(KERNEL_H - 1):
            above = above + (tl.zeros((BLOCK_Q, N), packed.dtype.element_ty),)
        if BEFORE[1]:
            first = oh0 - (1 if oh0 == 0 else 0)
        else:
            first = oh0
        for t in range(first, oh1 + TAIL):
            for i in tl.static_range(STEP_H):
                row = t * STEP_H + i
                there_h = (t < oh1) & (row >= -BEFORE[1]) & (row < height - BEFORE[1])
                wanted = there_h & (f < filters)
                g0, g1 = _row_grads(
                    grads, kept, sample, d, t, i, pair, f, wanted, depth, height, width,
                    out_depth, out_height, out_width, filters,
                    MAXIMUM, KERNEL, STRIDE, COUNTS, SLOPE,
                )  # fmt: skip
                if (kept is not None) and (not MAXIMUM):
                    pairs = ((sample * depth + plane) * height + row + BEFORE[1]) * out_width + pair
                    inside = (pair < out_width) & there_h
                    at = kept + words_at(pairs, tile, tiles, BLOCK_F)
                    g0, g1 = scaled_by_signs(g0, g1, tl.load(at, mask=inside, other=0), SLOPE)
                g1 = tl.where(2 * pair + 1 < width, g1, 0.0)
                if HAS_BIAS:
                    bias_total += g0 + g1
                grad = tl.reshape(tl.permute(tl.join(g0, g1), (0, 2, 1)), (BLOCK_Q, N))
                above = above + (grad.to(packed.dtype.element_ty),)
                r = tl.minimum(tl.maximum(row + BEFORE[1], 0), height + KERNEL_H - 2)
                source = window + r * x_h
                inputs = tl.trans(tl.load(source, mask=there, other=0))
                totals = _added(totals, inputs, above, PRECISION)
                above = above[1:]
    number = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    _store_totals(sums, totals, number, block, BLOCKS)
    if HAS_BIAS:
        to = bias_sums + number * BLOCK_F + tl.arange(0, BLOCK_F)
        tl.store(to, tl.sum(bias_total, 0), mask=block == 0)


@triton.jit
def _added(totals, inputs, grads, PRECISION: tl.constexpr):
    """The sums for each row of the kernel, with a row of inputs and the gradients it meets."""
    new = ()
    for j in tl.static_range(len(totals)):
        new = new + (tl.dot(inputs, grads[j], totals[j], input_precision=PRECISION),)
    return new


@triton.jit
def _store_totals(sums, totals, number, block, BLOCKS: tl.constexpr):
    KERNEL_H: tl.constexpr = len(totals)
    BLOCK_K: tl.constexpr = totals[0].shape[0]
    N: tl.constexpr = totals[0].shape[1]
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, N)
    for j in tl.static_range(KERNEL_H):
        target = (number * KERNEL_H + KERNEL_H - 1 - j) * BLOCKS + block
        tl.store(sums + (target * BLOCK_K + k[:, None]) * N + n[None, :], totals[j])


@triton.jit
def _row_grads(
    grads, kept, sample, d, t, i: tl.constexpr, pair, f, wanted,
    depth, height, width, out_depth, out_height, out_width, filters,
    MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COUNTS: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """What the windows pass on to both outputs of pairs, in row ``i`` of those that ``t`` owns."""
    LEAD_D: tl.constexpr = KERNEL[0] - STRIDE[0]
    LEAD_H: tl.constexpr = KERNEL[1] - STRIDE[1]
    LEAD_W: tl.constexpr = KERNEL[2] - STRIDE[2]
    STEP_D: tl.constexpr = STRIDE[0]
    WHOLE: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    ROWS: tl.constexpr = 1 + (LEAD_H if i == STRIDE[1] - 1 else 0)
    first = tl.zeros((pair.shape[0], f.shape[1]), tl.float32)
    second = tl.zeros((pair.shape[0], f.shape[1]), tl.float32)
    phase = (d + STEP_D) % STEP_D  # d may be negative
    for jd in tl.static_range(1 + LEAD_D):
        od = (d + STEP_D) // STEP_D - 1 + jd
        in_depth = (od >= 0) & (od < out_depth) & ((jd == 0) | (phase == STEP_D - 1))
        kd = (1 - jd) * (LEAD_D + phase)
        for jh in tl.static_range(ROWS):
            oh = t + jh
            place = (kd * KERNEL[1] + (1 - jh) * (LEAD_H + i)) * KERNEL[2]
            start = ((sample * out_depth + od) * out_height + oh) * out_width * filters
            for jw in tl.static_range(1 + LEAD_W):
                ow = pair + jw
                inside = wanted & in_depth & (oh >= 0) & (oh < out_height) & (ow < out_width)
                at = ow * filters + f
                g = tl.load(grads + start + at, mask=inside, other=0).to(tl.float32)
                if MAXIMUM:
                    code = tl.load(kept + start + at, mask=inside, other=127).to(tl.int32)
                    first, second = _through_maximum(
                        first, second, g, code, place, jw, LEAD_W, SLOPE
                    )
                else:
                    if not COUNTS:
                        g /= num_in_window(od, oh, ow, depth, height, width, KERNEL, STRIDE)
                    if jw == 0:
                        first += g
                    second += g
    if COUNTS and (not MAXIMUM):
        first *= 1.0 / WHOLE
        second *= 1.0 / WHOLE
    return first, second


@triton.jit
def _through_maximum(
    first, second, g, code, row_place, jw: tl.constexpr, LEAD_W: tl.constexpr, SLOPE: tl.constexpr
):
    """The gradients of both outputs of pairs, with what a window passes on to its maximum.

    The window is the pairs' own where ``jw`` is 0, else that of the pair after; ``row_place`` is
    the place in it where the outputs' row begins.
    """
    if SLOPE != 1:
        g = tl.where(code < 128, g, g * SLOPE if SLOPE != 0 else 0.0)
        code = code & 127
    if jw == 0:
        first += tl.where(code == row_place + LEAD_W, g, 0.0)
        second += tl.where(code == row_place + LEAD_W + 1, g, 0.0)
    else:
        second += tl.where(code == row_place, g, 0.0)
    return first, second
