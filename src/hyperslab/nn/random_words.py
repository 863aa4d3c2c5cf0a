"""Random numbers that depend on the seed and the global index, not on the mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperslab.comm.graph import is_watched
from hyperslab.comm.journal import journal
from hyperslab.layout import Box

NUM_WORDS = 1 << 32
_WORD = NUM_WORDS - 1
_FACTORS = 0x21F0AAAD, 0x735A2D97  # of the hash lowbias32; below 2**31: no int64 product overflows


def random_words(box: Box, num_dims: int, device: torch.device) -> Tensor:
    """Words of 32 bits, in int64, for the elements of ``box``: hashes of their global index.

    Only the first ``num_dims`` dims count; the tensor has extent 1 along the others.

    The seed comes from torch's CPU generator: all ranks draw the same one, and activation
    checkpointing, which restores that generator, draws the same numbers again.
    """
    bits = torch.randint(NUM_WORDS, ())  # a tensor, as a compiled graph draws one in every step
    if not is_watched():
        journal.add(torch.randint, (int(bits),))  # ranks compare what they drew
    for dim, span in enumerate(box.spans[:num_dims]):
        index = torch.arange(span.start, span.stop, dtype=torch.int64, device=device)
        bits = _mixed(bits ^ index.view(-1, *[1] * (len(box.spans) - 1 - dim)))
    return bits


def _mixed(bits: Tensor) -> Tensor:
    """Every bit of the 32-bit words in ``bits`` spread over all of them."""
    bits = (bits + 0x9E3779B9) & _WORD
    bits = ((bits ^ bits >> 16) * _FACTORS[0]) & _WORD
    bits = ((bits ^ bits >> 15) * _FACTORS[1]) & _WORD
    return bits ^ bits >> 15
