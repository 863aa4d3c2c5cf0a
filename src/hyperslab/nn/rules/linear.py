"""Dense layers."""

from __future__ import annotations

from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.nn.registry import register
from hyperslab.nn.rules.matmul import Names, contract
from hyperslab.nn.slab import Slab


@register(F.linear)
def linear(
    input: Slab | Tensor, weight: Slab | Tensor, bias: Slab | Tensor | None = None
) -> Slab | Tensor:
    """``input @ weight.T + bias`` along the last dim; summed over the ranks if that is split."""
    if not input.ndim or not 0 < weight.ndim < 3 or weight.shape[-1] != input.shape[-1]:
        raise LayoutError(
            f"linear: a weight of shape {tuple(weight.shape)} does not fit an input of shape "
            f"{tuple(input.shape)}"
        )
    if isinstance(input, Slab) and not isinstance(weight, Slab) and not isinstance(bias, Slab):
        fits = weight.ndim == 2 and (bias is None or bias.shape == weight.shape[:1])
        if fits and not input.layout.splits[-1]:  # no rank needs anything of the others
            layout = input.layout.with_dim(input.ndim - 1, weight.shape[0])
            return input.with_local(F.linear(input.local, weight, bias), layout)
    names, output = _names(input.ndim, weight.ndim)
    return contract(F.linear, (input, weight), names, output, F.linear, bias)


@lru_cache(maxsize=64)
def _names(ndim: int, weight: int) -> tuple[tuple[Names, Names], Names]:
    batch = tuple(f"batch {n}" for n in range(ndim - 1))
    out = ("out",) if weight == 2 else ()
    return ((*batch, "in"), (*out, "in")), (*batch, *out)
