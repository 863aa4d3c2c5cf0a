"""Pools of one process's tensors, in one call or, where that is too large, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import tiles
from hyperslab.kernels.tiles import Each, Sliding, Tile, Work, outermost_first, run_by_tiles
from hyperslab.layout import Numbers, Window, pool_numbers

_MAX_POOLS: list[Callable[..., Any]] = [F.max_pool1d, F.max_pool2d, F.max_pool3d]
_AVG_POOLS: list[Callable[..., Any]] = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]


def max_pool(
    x: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The max pool of torch for as many dims as ``x`` has besides samples and channels."""
    pool, last = _MAX_POOLS[x.ndim - 3], (dilation, ceil_mode, return_indices)
    spatial = _axes_if_large(x, kernel_size, stride, padding, dilation, ceil_mode)
    if spatial is None:
        return pool(x, kernel_size, stride, padding, *last)
    extents = x.shape[2:]

    def call(part: Tensor, tile: Tile) -> Sequence[Tensor]:
        found = pool(part, kernel_size, stride, _pads(spatial, tile), *last)
        if not return_indices:
            return [found]
        values, indices = found
        starts = [step.reads.start for step in tile[2:]]
        return [values, global_indices(indices, part.shape[2:], starts, extents)]

    outs = run_by_tiles(x, _per_channel(x, spatial, call))
    return outs if return_indices else outs[0]


def avg_pool(
    x: Tensor,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The average pool of torch for as many dims as ``x`` has besides samples and channels."""
    # The pool of 1 dim knows of no other divisors.
    divisor = () if divisor_override is None else (divisor_override,)
    pool, last = _AVG_POOLS[x.ndim - 3], (ceil_mode, count_include_pad, *divisor)
    spatial = _axes_if_large(x, kernel_size, stride, padding, 1, ceil_mode)
    if spatial is None:
        return pool(x, kernel_size, stride, padding, *last)  # type: ignore[no-any-return]

    def call(part: Tensor, tile: Tile) -> Sequence[Tensor]:
        return [pool(part, kernel_size, stride, _pads(spatial, tile), *last)]

    return run_by_tiles(x, _per_channel(x, spatial, call))[0]


def _pads(spatial: Sequence[Sliding], tile: Tile) -> list[int]:
    return [axis.pads(step.own) for axis, step in zip(spatial, tile[2:], strict=True)]


def _per_channel(
    x: Tensor, spatial: Sequence[Sliding], call: Callable[[Tensor, Tile], Sequence[Tensor]]
) -> Work:
    return Work(call, (Each(x.shape[0]), Each(x.shape[1]), *spatial), outermost_first(x))


def _axes_if_large(
    x: Tensor,
    kernel: Numbers,
    stride: Numbers | None,
    padding: Numbers,
    dilation: Numbers,
    ceil: bool,
) -> list[Sliding] | None:
    """How the spatial dims may be cut, if there is more than one call's work."""
    numel, num_dims = x.numel(), x.ndim - 2
    if numel <= tiles.MAX_NUMEL >> num_dims:  # an output extent is twice that of the input at most
        return None
    windows = map(Window, *pool_numbers(num_dims, kernel, stride, padding, dilation))
    spatial = [_sliding(w, n, ceil=ceil) for w, n in zip(windows, x.shape[2:], strict=True)]
    outputs = math.prod(x.shape[:2]) * math.prod(axis.extent for axis in spatial)
    return spatial if max(numel, outputs) > tiles.MAX_NUMEL else None


def _sliding(window: Window, num_inputs: int, *, ceil: bool) -> Sliding:
    """With ``ceil`` the last window may reach beyond the padding, if it starts before it."""
    if not ceil:
        return Sliding(window, num_inputs, window.output_extent(num_inputs))
    k, s, p, d = window.kernel, window.stride, window.padding, window.dilation
    window = Window(k, s, p, d, extra=s - 1)
    num = window.output_extent(num_inputs)
    return Sliding(window, num_inputs, num - ((num - 1) * s >= num_inputs + p))


def global_indices(
    indices: Tensor, shape: Sequence[int], sources: Sequence[int | Tensor], extents: Sequence[int]
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
