"""Dense layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.reduce import reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout
from hyperslab.nn.align import check_operands
from hyperslab.nn.registry import register
from hyperslab.nn.slab import Slab


@register(F.linear)
def linear(input: Slab, weight: Tensor, bias: Tensor | None = None) -> Slab | Tensor:
    """``input @ weight.T + bias`` along the last dim; summed over the ranks if that is split."""
    x = check_operands(F.linear, input, weight, bias)
    if not x.ndim or weight.shape[-1] != x.layout.shape[-1]:
        raise LayoutError(
            f"linear: a weight of shape {tuple(weight.shape)} does not fit an input of shape "
            f"{tuple(x.shape)}"
        )
    split = x.layout.splits[-1]
    local = _product(x, weight, bias) if split else F.linear(x.local, weight, bias)
    if not local.ndim:
        return local
    if weight.ndim == 1:
        return x.with_local(local, Layout(x.layout.shape[:-1], x.layout.splits[:-1]))
    return x.with_local(local, x.layout.with_dim(x.ndim - 1, weight.shape[0]))


def _product(x: Slab, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each rank multiplies what it holds by its columns of ``weight``; the products are added."""
    span = x.box.spans[-1]
    part = F.linear(x.local, weight.narrow(-1, span.start, span.size))
    wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
    total = reduce_sum(wide, x.mesh, x.layout.axes_of([x.ndim - 1])).to(part.dtype)
    return total if bias is None else total + bias.to(total.dtype)
