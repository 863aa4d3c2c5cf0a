"""Signs of a convolution's outputs, a bit for each: what an activation's gradient wants to know.

The signs of WORD filters, for both outputs of a pair, are one 32-bit number.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORD = tl.constexpr(16)


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
