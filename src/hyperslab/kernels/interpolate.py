"""Interpolation of one process's tensors, in one call or, where that is too large, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import tiles
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.kernels.tiles import Axis, Each, Tile, Whole, Work, run_by_tiles


def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    *options: Any,
) -> Tensor:
    """``F.interpolate`` of any size: what is too large is cut along samples and channels."""
    num_samples, num_channels, *extents = x.shape
    sizes = _output_sizes(extents, size, scale_factor)
    numel = num_samples * num_channels * max(math.prod(extents), math.prod(sizes))
    if numel <= tiles.MAX_NUMEL:
        return F.interpolate(x, size, scale_factor, *options)

    def call(part: Tensor, _: Tile) -> list[Tensor]:
        return [F.interpolate(part, size, scale_factor, *options)]

    spatial = map(Whole, extents, sizes)
    axes: tuple[Axis, ...] = (Each(num_samples), Each(num_channels), *spatial)
    return run_by_tiles(x, Work(call, axes, (0, 1), memory_format_of(x)))[0]


def _output_sizes(extents: Sequence[int], size: Any, scale_factor: Any) -> list[int]:
    num_dims = len(extents)
    if size is not None:
        return [size] * num_dims if hasattr(size, "__index__") else list(size)
    factors = [scale_factor] * num_dims if hasattr(scale_factor, "__float__") else scale_factor
    return [math.floor(n * f) for n, f in zip(extents, factors, strict=True)]
