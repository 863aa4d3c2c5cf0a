"""Triton kernels that lay out weights for ``few_channels``, and gather their gradients."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lay_out_kernel(
    weight, out, filters, channels, w_f, w_c, w_d, w_h, w_w, numel,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Writes weights of any strides, mirrored where TURNED, to BLOCK places."""
    N: tl.constexpr = GROUP * BLOCK_F
    PLANES: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + PLANES - 1) // PLANES
    KERNEL_W: tl.constexpr = ROW // CHANNELS - GROUP + 1
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = place % N
    k = place // N % BLOCK_K
    block = place // (N * BLOCK_K) % BLOCKS
    h = place // (N * BLOCK_K * BLOCKS) % KERNEL_H
    f = place // (N * BLOCK_K * BLOCKS * KERNEL_H) * BLOCK_F + n % BLOCK_F
    c = k % CHANNELS
    d = block * PLANES + k // ROW
    w = k % ROW // CHANNELS - n // BLOCK_F
    inside = (f < filters) & (c < channels) & (d < KERNEL_D) & (w >= 0) & (w < KERNEL_W)
    if TURNED:
        d, h, w = KERNEL_D - 1 - d, KERNEL_H - 1 - h, KERNEL_W - 1 - w
    source = weight + f * w_f + c * w_c + d * w_d + h * w_h + w * w_w
    tl.store(out + place, tl.load(source, mask=inside, other=0), mask=place < numel)


@triton.jit(do_not_specialize=["programs"])
def gather_kernel(
    sums, grads, programs, filters, g_f, g_c, g_d, g_h, g_w,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds up what ``programs`` found for the places of a channel's weights at one tap."""
    N: tl.constexpr = GROUP * BLOCK_F
    PLANES: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + PLANES - 1) // PLANES
    KERNEL_W: tl.constexpr = ROW // CHANNELS - GROUP + 1
    NUMEL: tl.constexpr = KERNEL_H * BLOCKS * BLOCK_K * N
    c = tl.program_id(0)
    w = tl.program_id(1) % KERNEL_W
    h = tl.program_id(1) // KERNEL_W % KERNEL_H
    d = tl.program_id(1) // (KERNEL_W * KERNEL_H)
    row = (h * BLOCKS + d // PLANES) * BLOCK_K + d % PLANES * ROW + w * CHANNELS + c
    start = sums + tl.program_id(2).to(tl.int64) * programs * NUMEL + row * N
    f = tl.arange(0, BLOCK_F)
    total = tl.zeros((AT_ONCE, BLOCK_F), tl.float32)
    for first in range(0, programs, AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)[:, None]
        for p in tl.static_range(GROUP):
            place = start + p * (CHANNELS * N + BLOCK_F) + program.to(tl.int64) * NUMEL + f[None, :]
            total += tl.load(place, mask=program < programs, other=0)
    f += tl.program_id(2) * BLOCK_F
    target = grads + f * g_f + (c * g_c + d * g_d + h * g_h + w * g_w)
    tl.store(target, tl.sum(total, 0).to(grads.dtype.element_ty), mask=f < filters)
