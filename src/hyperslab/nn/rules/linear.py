"""Dense layers along a dim that every rank holds whole."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab


@register(F.linear)
def linear(input: Slab, weight: Tensor, bias: Tensor | None = None) -> Slab:
    """``input @ weight.T + bias`` along the last dim."""
    if not isinstance(input, Slab):
        raise TypeError("linear wants a Slab as its input where another argument is one")
    last = input.ndim - 1
    if last in input.layout.split_dims:
        raise unsupported(F.linear, input, "the dim that it multiplies is split")
    local = F.linear(input.local, weight, bias)
    if weight.ndim == 1:
        shape, splits = input.layout.shape[:-1], input.layout.splits[:-1]
        return input.with_local(local, type(input.layout)(shape, splits))
    return input.with_local(local, input.layout.with_dim(last, weight.shape[0]))
