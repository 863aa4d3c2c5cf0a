"""Dense layers along a dim that every rank holds whole."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hyperslab.layout import Layout
from hyperslab.nn.align import check_operands
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab


@register(F.linear)
def linear(input: Slab, weight: Tensor, bias: Tensor | None = None) -> Slab:
    """``input @ weight.T + bias`` along the last dim."""
    x = check_operands(F.linear, input, weight, bias)
    last = x.ndim - 1
    if last in x.layout.split_dims:
        raise unsupported(F.linear, x, "the dim that it multiplies is split")
    local = F.linear(x.local, weight, bias)
    if weight.ndim == 1:
        return x.with_local(local, Layout(x.layout.shape[:-1], x.layout.splits[:-1]))
    return x.with_local(local, x.layout.with_dim(last, weight.shape[0]))
