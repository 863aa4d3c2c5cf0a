"""Triton kernels of an activation and an average pool; ``act_pool`` says what they share.

The backward pass must know where y is positive: a bit for each number, ``bits`` of them for each
cell, and rows are rounded up to bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.act_pool import (
    SIZES,
    activated,
    byte_places,
    num_in_bounds,
    packed,
    program_place,
    replaced,
    store_gradients,
    unpacked,
)


@triton.jit(do_not_specialize=SIZES)
def average_forward(
    y, out, signs,
    depth, height, width,
    out_depth, out_height, out_width,
    num_chunks, num_groups, num_cols,
    channels: tl.constexpr, bits: tl.constexpr, slope: tl.constexpr, counts_padding: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    chunk: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    """Goes down ``chunk`` planes of ``rows`` rows of outputs, and reads each input plane once.

    Step ``t`` reads the planes ``t * stride - padding + r``. They lie in the windows ``t``,
    ``t - 1``, ...: ``sums`` holds those that are still open, ``rows`` for each. All is read before
    anything is written, because the compiler moves no read past a write.
    """
    wide: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    num_lanes: tl.constexpr = (channels + lanes - 1) // lanes
    kd: tl.constexpr = kernel[0]
    sd: tl.constexpr = stride[0]
    kh: tl.constexpr = kernel[1]
    sh: tl.constexpr = stride[1]
    reach: tl.constexpr = (kd + sd - 1) // sd
    num_planes: tl.constexpr = min(kd, sd)
    num_rows: tl.constexpr = (rows - 1) * sh + kh
    keeps: tl.constexpr = signs is not None
    first_row: tl.constexpr = min(padding[1], max(kh - sh, 0))
    num_owned: tl.constexpr = min(rows * sh, num_rows - first_row)

    sample, first, group, col, lane = program_place(num_lanes, num_cols, num_groups, num_chunks)
    first = first * chunk
    zero = tl.zeros((cols, lanes), wide)
    sums = (zero,) * (reach * rows)
    for step in range(chunk + reach - 1):
        t = first + step
        positive = ()
        for r in tl.static_range(num_planes):
            plane = t * sd - padding[0] + r
            wanted = (plane >= 0) & (plane < depth)
            if r + sd >= kd:
                wanted = wanted & (step < chunk)
            for i in tl.static_range(num_rows):
                row = group * (rows * sh) - padding[1] + i
                start = y + ((sample * depth + plane) * height + row) * width * channels
                inside = wanted & (row >= 0) & (row < height)
                total = _row_sum(start, col, lane, width, inside, channels, slope,
                                 kernel, stride, padding, cols, lanes, wide)  # fmt: skip
                if keeps and (i >= first_row) and (i < first_row + num_owned):
                    positive += _row_signs(start, col, lane, width, inside, channels,
                                           kernel, stride, padding, cols, lanes)  # fmt: skip
                for u in tl.static_range(rows):
                    if (i >= u * sh) and (i - u * sh < kh):
                        for j in tl.static_range(reach):
                            if r + j * sd < kd:
                                sums = _added(sums, j * rows + u, total)
        if keeps:
            for r in tl.static_range(num_planes):
                plane = t * sd - padding[0] + r
                owned = (plane >= 0) & (plane < depth)
                owned = owned & ((step < chunk) | (first + chunk >= out_depth))
                for i in tl.static_range(num_owned):
                    row = group * (rows * sh) - padding[1] + first_row + i
                    start = ((sample * depth + plane) * height + row) * ((width * bits + 7) // 8)
                    _write_signs(signs + start, positive, r * num_owned + i, col, lane, width,
                                 owned & (row >= 0) & (row < height), channels, bits,
                                 kernel, stride, padding, cols, lanes)  # fmt: skip
        done = t - (reach - 1)
        for u in tl.static_range(rows):
            row = group * rows + u
            start = out + ((sample * out_depth + done) * out_height + row) * out_width * channels
            inside = (row < out_height) & (done >= first) & (done < out_depth)
            ow = col * cols + tl.arange(0, cols)[:, None]
            c = lane * lanes + tl.arange(0, lanes)[None, :]
            count = kd * kh * kernel[2]
            if not counts_padding:
                count = num_in_bounds(ow, width, kernel[2], stride[2], padding[2])
                count *= num_in_bounds(row, height, kh, sh, padding[1])
                count *= num_in_bounds(done, depth, kd, sd, padding[0])
                count = tl.maximum(count, 1)  # of what is no window
            mean = sums[(reach - 1) * rows + u] / count
            inside = inside & (ow < out_width) & (c < channels)
            tl.store(start + (ow * channels + c), mean, mask=inside)
        sums = (zero,) * rows + sums[: (reach - 1) * rows]


@triton.jit
def _added(sums, slot: tl.constexpr, value):
    return replaced(sums, slot, sums[slot] + value)


@triton.jit
def _row_sum(
    start, col, lane, width, wanted,
    channels: tl.constexpr, slope: tl.constexpr, kernel: tl.constexpr, stride: tl.constexpr,
    padding: tl.constexpr, cols: tl.constexpr, lanes: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The sums of the windows of one row."""
    kw: tl.constexpr = kernel[2]
    cell = tl.arange(0, cols)[:, None]
    total = tl.zeros((cols, lanes), wide)
    for k in tl.static_range(kw):
        w = _window_cell(cell, col, k, stride[2], padding[2], cols)
        x = _load(start, w, lane, width, wanted, channels, lanes)
        total += activated(x.to(wide), slope)
    return total


@triton.jit
def _row_signs(
    start, col, lane, width, wanted,
    channels: tl.constexpr, kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Where the block's own cells of one row are positive, in ``stride`` parts."""
    num_parts: tl.constexpr = stride[2]
    cell = tl.arange(0, cols)[:, None]
    signs = ()
    for part in tl.static_range(num_parts):
        w = _own_cell(cell, col, part, kernel[2], stride[2], padding[2], cols, lanes)
        # The compiler reads only once what _row_sum reads as well.
        x = _load(start, w, lane, width, wanted, channels, lanes)
        signs += (packed(x > 0, cols, lanes),)
    return signs


@triton.jit
def _load(
    start, w, lane, width, wanted,
    channels: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    c = lane * lanes + tl.arange(0, lanes)[None, :]
    inside = (w >= 0) & (w < width) & (c < channels) & wanted
    return tl.load(start + (w * channels + c), mask=inside, other=0.0)


@triton.jit
def _write_signs(
    start, signs, number: tl.constexpr, col, lane,
    width, wanted, channels: tl.constexpr, bits: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    num_parts: tl.constexpr = stride[2]
    cell, c = byte_places(cols, lanes)
    c += lane * lanes
    for part in tl.static_range(num_parts):
        w = _own_cell(cell, col, part, kernel[2], stride[2], padding[2], cols, lanes)
        inside = (w >= 0) & (w < width) & (c < channels) & wanted
        tl.store(start + (w * bits + c) // 8, signs[number * num_parts + part], mask=inside)


@triton.jit
def _window_cell(
    cell, col, k: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr,
):  # fmt: skip
    """Where number ``k`` of the windows of a block's outputs lies."""
    return (col * cols + cell) * stride + (k - padding)


@triton.jit
def _own_cell(
    cell, col, part: tl.constexpr, kernel: tl.constexpr,
    stride: tl.constexpr, padding: tl.constexpr, cols: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Whose signs a block writes: cells of its windows or, where a byte has several, of a row."""
    if lanes < 8:
        return (col * stride + part) * cols + cell
    return _window_cell(
        cell, col, min(padding, max(kernel - stride, 0)) + part, stride, padding, cols
    )


@triton.jit(do_not_specialize=SIZES)
def average_backward(
    grad, signs, out,
    depth, height, width,
    out_depth, out_height, out_width,
    num_chunks, num_groups, num_cols,
    channels: tl.constexpr, bits: tl.constexpr, slope: tl.constexpr, counts_padding: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    """Writes ``stride`` planes of ``stride`` rows of the gradient of y, from where a window begins.

    All is read before anything is written: then the compiler reads only once what rows share.
    """
    sd: tl.constexpr = stride[0]
    sh: tl.constexpr = stride[1]
    num_lanes: tl.constexpr = (channels + lanes - 1) // lanes
    sample, td, th, col, lane = program_place(num_lanes, num_cols, num_groups, num_chunks)
    grads = ()
    for rd in tl.static_range(sd):
        for rh in tl.static_range(sh):
            total = _window_grads(
                grad, sample, td, th, col, lane, depth, height, width, out_depth, out_height,
                out_width, rd, rh, channels, counts_padding, kernel, stride, padding, cols, lanes,
            )  # fmt: skip
            if slope != 1:
                plane, row = td * sd - padding[0] + rd, th * sh - padding[1] + rh
                inside = (plane >= 0) & (plane < depth) & (row >= 0) & (row < height)
                start = ((sample * depth + plane) * height + row) * ((width * bits + 7) // 8)
                positive = _read_signs(
                    signs + start, col, lane, width, inside, channels, bits, cols, lanes
                )
                total = tl.where(positive, total, total * slope if slope != 0 else 0.0)
            grads += (total,)
    store_gradients(
        out, grads, sample, td, th, col, lane, depth, height, width,
        channels, stride, padding, cols, lanes,
    )  # fmt: skip


@triton.jit
def _window_grads(
    grad, sample, td, th, col,
    lane, depth, height, width,
    out_depth, out_height, out_width,
    rd: tl.constexpr, rh: tl.constexpr, channels: tl.constexpr, counts_padding: tl.constexpr,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    cols: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """The sums over the windows that hold each cell of one row of y."""
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
            start = grad + ((sample * out_depth + od) * out_height + oh) * out_width * channels
            for jw in tl.static_range(windows_w):
                ow = w // stride[2] - jw
                inside = (ow >= 0) & (ow < out_width) & (c < channels) & there
                inside = inside & (w - ow * stride[2] < kernel[2])
                g = tl.load(start + (ow * channels + c), mask=inside, other=0.0).to(wide)
                if not counts_padding:
                    count = num_in_bounds(ow, width, kernel[2], stride[2], padding[2])
                    count *= num_in_bounds(oh, height, kernel[1], stride[1], padding[1])
                    count *= num_in_bounds(od, depth, kernel[0], stride[0], padding[0])
                    g /= tl.maximum(count, 1)
                total += g
    return total / (kernel[0] * kernel[1] * kernel[2]) if counts_padding else total


@triton.jit
def _read_signs(
    start, col, lane, width, wanted,
    channels: tl.constexpr, bits: tl.constexpr, cols: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    cell, c = byte_places(cols, lanes)
    w, c = col * cols + cell, lane * lanes + c
    inside = (w < width) & (c < channels) & wanted
    signs = tl.load(start + (w * bits + c) // 8, mask=inside, other=0)
    return unpacked(signs, cols, lanes)
