"""Triton kernels of an activation and a maximum pool; ``act_pool`` says what they share.

An activation whose slope is not negative keeps the order, so that the maximum is found first. A
byte for each output says where in its window it was (in the order depth, height, width), and by its
highest bit that the activation scaled it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.act_pool import (
    SIZES,
    activated,
    program_place,
    replaced,
    store_gradients,
)


@triton.jit(do_not_specialize=SIZES)
def maximum_forward(
    y, out, codes,
    depth, height, width,
    out_depth, out_height, out_width,
    num_chunks, num_groups, num_cols,
    channels: tl.constexpr, slope: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    chunk: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    """Goes down ``chunk`` planes of ``rows`` rows of outputs, as that of the average does."""
    wide: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    num_lanes: tl.constexpr = (channels + lanes - 1) // lanes
    kd: tl.constexpr = kernel[0]
    sd: tl.constexpr = stride[0]
    kh: tl.constexpr = kernel[1]
    sh: tl.constexpr = stride[1]
    reach: tl.constexpr = (kd + sd - 1) // sd
    num_planes: tl.constexpr = min(kd, sd)
    num_rows: tl.constexpr = (rows - 1) * sh + kh

    sample, first, group, col, lane = program_place(num_lanes, num_cols, num_groups, num_chunks)
    first = first * chunk
    ow = col * cols + tl.arange(0, cols)[:, None]
    c = lane * lanes + tl.arange(0, lanes)[None, :]
    least = tl.full((cols, lanes), float("-inf"), wide)
    before = tl.maximum(padding[2] - ow * stride[2], 0) + tl.zeros((cols, lanes), tl.int32)
    best, place = (least,) * (reach * rows), (before,) * (reach * rows)
    for step in range(chunk + reach - 1):
        t = first + step
        for u in tl.static_range(rows):
            # Where all is minus infinity, the first that is not padding is the maximum.
            above = tl.maximum(padding[1] - (group * rows + u) * sh, 0)
            above += tl.maximum(padding[0] - t * sd, 0) * kh
            place = replaced(place, u, before + above * kernel[2])
        for r in tl.static_range(num_planes):
            plane = t * sd - padding[0] + r
            wanted = (plane >= 0) & (plane < depth)
            if r + sd >= kd:
                wanted = wanted & (step < chunk)
            for i in tl.static_range(num_rows):
                row = group * (rows * sh) - padding[1] + i
                start = y + ((sample * depth + plane) * height + row) * width * channels
                inside = wanted & (row >= 0) & (row < height)
                value, k = _row_maximum(
                    start, ow, c, width, inside, channels, kernel, stride, padding, wide
                )
                for u in tl.static_range(rows):
                    if (i >= u * sh) and (i - u * sh < kh):
                        for j in tl.static_range(reach):
                            if r + j * sd < kd:
                                at = k + ((r + j * sd) * kh + (i - u * sh)) * kernel[2]
                                best, place = _compared(best, place, j * rows + u, value, at)
        done = t - (reach - 1)
        for u in tl.static_range(rows):
            row = group * rows + u
            value = best[(reach - 1) * rows + u]
            start = ((sample * out_depth + done) * out_height + row) * out_width * channels
            inside = (row < out_height) & (done >= first) & (done < out_depth)
            inside = inside & (ow < out_width) & (c < channels)
            tl.store(out + start + (ow * channels + c), activated(value, slope), mask=inside)
            if codes is not None:
                code = place[(reach - 1) * rows + u]
                if slope != 1:
                    code = tl.where(value > 0, code, code + 128)
                tl.store(codes + start + (ow * channels + c), code.to(tl.uint8), mask=inside)
        best = (least,) * rows + best[: (reach - 1) * rows]
        place = (before,) * rows + place[: (reach - 1) * rows]


@triton.jit
def _row_maximum(
    start, ow, c, width, wanted,
    channels: tl.constexpr, kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    """The maximum of each window of one row and its place: the first, or the last that is NaN."""
    kw: tl.constexpr = kernel[2]
    best = tl.full((ow.shape[0], c.shape[1]), float("-inf"), wide)
    place = tl.zeros((ow.shape[0], c.shape[1]), tl.int32)
    for k in tl.static_range(kw):
        w = ow * stride[2] + (k - padding[2])
        inside = (w >= 0) & (w < width) & (c < channels) & wanted
        x = tl.load(start + (w * channels + c), mask=inside, other=float("-inf")).to(wide)
        taken = (x > best) | (x != x)
        best = tl.where(taken, x, best)
        place = tl.where(taken, k, place)
    return best, place


@triton.jit
def _compared(best, place, slot: tl.constexpr, value, at):
    taken = (value > best[slot]) | (value != value)
    new_best = replaced(best, slot, tl.where(taken, value, best[slot]))
    return new_best, replaced(place, slot, tl.where(taken, at, place[slot]))


@triton.jit(do_not_specialize=SIZES)
def maximum_backward(
    grad, codes, out,
    depth, height, width,
    out_depth, out_height, out_width,
    num_chunks, num_groups, num_cols,
    channels: tl.constexpr, slope: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    """Writes ``stride`` planes of ``stride`` rows of the gradient of y, as that of the average."""
    sd: tl.constexpr = stride[0]
    sh: tl.constexpr = stride[1]
    num_lanes: tl.constexpr = (channels + lanes - 1) // lanes
    sample, td, th, col, lane = program_place(num_lanes, num_cols, num_groups, num_chunks)
    grads = ()
    for rd in tl.static_range(sd):
        for rh in tl.static_range(sh):
            grads += (
                _chosen_grads(
                    grad, codes, sample, td, th, col, lane, out_depth, out_height, out_width,
                    rd, rh, channels, slope, kernel, stride, padding, cols, lanes,
                ),
            )  # fmt: skip
    store_gradients(
        out, grads, sample, td, th, col, lane, depth, height, width,
        channels, stride, padding, cols, lanes,
    )  # fmt: skip


@triton.jit
def _chosen_grads(
    grad, codes, sample, td, th,
    col, lane, out_depth, out_height,
    out_width, rd: tl.constexpr, rh: tl.constexpr, channels: tl.constexpr,
    slope: tl.constexpr, kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The sums over the windows whose maximum is in a cell, for the cells of one row of y."""
    wide: tl.constexpr = tl.float64 if grad.dtype.element_ty == tl.float64 else tl.float32
    windows_d: tl.constexpr = (kernel[0] - rd + stride[0] - 1) // stride[0]
    windows_h: tl.constexpr = (kernel[1] - rh + stride[1] - 1) // stride[1]
    windows_w: tl.constexpr = (kernel[2] + stride[2] - 1) // stride[2]
    w = col * cols + tl.arange(0, cols)[:, None] + padding[2]
    c = lane * lanes + tl.arange(0, lanes)[None, :]
    total = tl.zeros((cols, lanes), wide)
    for jd in tl.static_range(windows_d):
        for jh in tl.static_range(windows_h):
            od, oh = td - jd, th - jh
            there = (od >= 0) & (od < out_depth) & (oh >= 0) & (oh < out_height)
            start = ((sample * out_depth + od) * out_height + oh) * out_width * channels
            row_place = (rd + jd * stride[0]) * kernel[1] + (rh + jh * stride[1])
            for jw in tl.static_range(windows_w):
                ow = w // stride[2] - jw
                k = w - ow * stride[2]
                inside = (ow >= 0) & (ow < out_width) & (c < channels) & there & (k < kernel[2])
                offset = start + (ow * channels + c)
                code = tl.load(codes + offset, mask=inside, other=127).to(tl.int32)
                g = tl.load(grad + offset, mask=inside, other=0.0).to(wide)
                if slope != 1:
                    g = tl.where(code < 128, g, g * slope if slope != 0 else 0.0)
                total += tl.where((code & 127) == row_place * kernel[2] + k, g, 0.0)
    return total
