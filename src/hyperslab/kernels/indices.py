"""Flat indices into the spatial dims of a tensor, from those into a part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def global_indices(
    indices: Tensor,
    shape: Sequence[int],
    sources: Sequence[int | Tensor],
    extents: Sequence[int],
) -> Tensor:
    """Flat indices into the global tensor's spatial dims from ``indices`` into a local tensor's.

    ``shape`` is the local tensor's along the spatial dims and ``extents`` the global one's.
    ``sources[dim]`` says where the local indices of a dim lie in the global tensor: one by one, or
    in a row from the one given.
    """
    if tuple(shape) == tuple(extents) and all(isinstance(s, int) and not s for s in sources):
        return indices
    total, sizes = torch.zeros_like(indices), list(shape)
    for source, extent in zip(sources, extents, strict=True):
        sizes = sizes[1:]
        inner = math.prod(sizes)
        place, indices = indices // inner, indices % inner
        total = total * extent + (source[place] if isinstance(source, Tensor) else place + source)
    return total
