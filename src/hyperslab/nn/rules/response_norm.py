"""Normalization of each pixel by those of the neighbouring channels."""

from __future__ import annotations

import torch.nn.functional as F

from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab


@register(F.local_response_norm)
def local_response_norm(
    input: Slab, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Slab:
    """The local norm of each piece, as no pixel needs another and channels are whole."""
    if not input.is_floating_point():
        raise unsupported(F.local_response_norm, input, "its numbers are not floating point")
    if input.ndim > 1 and input.layout.splits[1]:
        raise unsupported(F.local_response_norm, input, "its channels are split")
    return input.with_local(F.local_response_norm(input.local, size, alpha, beta, k))
