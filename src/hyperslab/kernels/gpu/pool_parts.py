"""What pools of convolutions sum on the way to a result, *parts*, and what backward passes keep.

A part is a tuple of a sum (average), or of a maximum and its place in the window. Several parts are
one tuple, one after the other. An activation's gradient wants the signs of the convolution's
outputs, a bit each: those of WORD filters, for both outputs of a pair, are one 32-bit number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.act_pool import num_in_bounds

WORD = tl.constexpr(16)


@triton.jit
def no_parts(NUM: tl.constexpr, SIZE: tl.constexpr, FILTERS: tl.constexpr, MAXIMUM: tl.constexpr):
    """The parts of no outputs."""
    parts = ()
    for _ in tl.static_range(NUM):
        if MAXIMUM:
            least = tl.full((SIZE, FILTERS), float("-inf"), tl.float32)
            parts = parts + (least, tl.zeros((SIZE, FILTERS), tl.int32))
        else:
            parts = parts + (tl.zeros((SIZE, FILTERS), tl.float32),)
    return parts


@triton.jit
def row_parts(y0, y1, has_first, has_second, LEAD_W: tl.constexpr, MAXIMUM: tl.constexpr):
    """The parts of pairs, and where windows overlap those of their second outputs."""
    if MAXIMUM:
        y0 = tl.where(has_first, y0, float("-inf"))
        y1 = tl.where(has_second, y1, float("-inf"))
        second = (y1 > y0) | (y1 != y1)
        parts = (tl.where(second, y1, y0), tl.where(second, LEAD_W + 1, LEAD_W))
        if LEAD_W:
            parts = parts + (y1, tl.zeros(y1.shape, tl.int32))
    else:
        y1 = tl.where(has_second, y1, 0.0)
        parts = (tl.where(has_first, y0, 0.0) + y1,)
        if LEAD_W:
            parts = parts + (y1,)
    return parts


@triton.jit
def merged(ours, theirs, MAXIMUM: tl.constexpr):
    """Two tuples of parts as one: of equal maxima the first in the window is taken."""
    both = ()
    if MAXIMUM:
        for i in tl.static_range(len(ours) // 2):
            a, b = ours[2 * i], theirs[2 * i]
            at, to = ours[2 * i + 1], theirs[2 * i + 1]
            taken = (b > a) | (b != b) | ((b == a) & (to < at))
            both = both + (tl.where(taken, b, a), tl.where(taken, to, at))
    else:
        for i in tl.static_range(len(ours)):
            both = both + (ours[i] + theirs[i],)
    return both


@triton.jit
def moved(parts, places, MAXIMUM: tl.constexpr):
    """Parts whose places lie further on in the window."""
    if MAXIMUM:
        further = ()
        for i in tl.static_range(len(parts) // 2):
            further = further + (parts[2 * i], parts[2 * i + 1] + places)
    else:
        further = parts
    return further


@triton.jit
def of_pair_before(part, pair, MAXIMUM: tl.constexpr):
    """Each pair's part of the pair before."""
    before = tl.maximum(tl.arange(0, part[0].shape[0]) - 1, 0)[:, None]
    before = before + tl.zeros(part[0].shape, tl.int32)
    value = tl.gather(part[0], before, 0)
    if MAXIMUM:
        value = tl.where(pair > 0, value, float("-inf"))
        found = (value, tl.gather(part[1], before, 0))
    else:
        found = (tl.where(pair > 0, value, 0.0),)
    return found


@triton.jit
def load_part(sums, places, at, wanted, MAXIMUM: tl.constexpr):
    """A part that ``store_part`` stored, or one of no outputs where none is ``wanted``."""
    wanted = wanted & (at >= 0)
    if MAXIMUM:
        value = tl.load(sums + at, mask=wanted, other=float("-inf"))
        part = (value, tl.load(places + at, mask=wanted, other=0).to(tl.int32))
    else:
        part = (tl.load(sums + at, mask=wanted, other=0.0),)
    return part


@triton.jit
def store_part(sums, places, at, is_first, first, second, MAXIMUM: tl.constexpr):
    """Stores one part or the other, where ``at`` is not negative."""
    if MAXIMUM:
        place = tl.where(is_first, first[1], second[1]).to(tl.uint8)
        tl.store(places + at, place, mask=at >= 0)
    tl.store(sums + at, tl.where(is_first, first[0], second[0]), mask=at >= 0)


@triton.jit
def num_in_window(
    od, oh, ow, depth, height, width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """How many outputs of the convolution a window holds."""
    count = num_in_bounds(ow, width, KERNEL[2], STRIDE[2], KERNEL[2] - STRIDE[2])
    count *= num_in_bounds(oh, height, KERNEL[1], STRIDE[1], KERNEL[1] - STRIDE[1])
    count *= num_in_bounds(od, depth, KERNEL[0], STRIDE[0], KERNEL[0] - STRIDE[0])
    return tl.maximum(count, 1)


@triton.jit
def words_at(pair, tile, tiles, BLOCK_F: tl.constexpr):
    """Where the words of a block of filters are, for pairs that are numbered through."""
    at = (pair * tiles + tile) * (BLOCK_F // WORD)
    return at + tl.arange(0, BLOCK_F // WORD)[None, :]


@triton.jit
def packed_signs(y0, y1):
    """The words of pairs: whether their outputs are positive."""
    P: tl.constexpr = y0.shape[0]
    F: tl.constexpr = y0.shape[1]
    bit = 1 << (tl.arange(0, F) % WORD)[None, :]
    bits = tl.where(y0 > 0, bit, 0) + tl.where(y1 > 0, bit << WORD, 0)
    return tl.sum(tl.reshape(bits, (P, F // WORD, WORD)), 2)


@triton.jit
def scaled_by_signs(g0, g1, words, SLOPE: tl.constexpr):
    """The gradients before the activation, of which ``words`` has the signs."""
    P: tl.constexpr = words.shape[0]
    NUM: tl.constexpr = words.shape[1]
    bits = words[:, :, None] >> tl.arange(0, WORD)[None, None, :]
    bits = tl.reshape(bits, (P, NUM * WORD))
    g0 = tl.where((bits & 1) != 0, g0, g0 * SLOPE if SLOPE != 0 else 0.0)
    g1 = tl.where(((bits >> WORD) & 1) != 0, g1, g1 * SLOPE if SLOPE != 0 else 0.0)
    return g0, g1
