"""Norms of one process's piece: statistics, output and gradient, each in one pass.

Between the passes of a batch norm ranks exchange statistics (``hyperslab.dist_ops.norm``). Pieces
whose channels are last in memory, on a GPU, are read by the kernels of torch's SyncBatchNorm, once
in each function here; others by several pointwise functions and sums. Statistics have one number a
channel, in float32 for shorter floats. What is too large for one kernel call is computed in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import fused, tiles
from hyperslab.kernels.memory_format import RowsBeside, empty_with_rows
from hyperslab.kernels.tiles import (
    Each,
    Tile,
    Work,
    outermost_first,
    own_of,
    pick_tiles,
    run_by_tiles,
)

_NATIVE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def fits(x: Tensor) -> bool:
    """Whether a norm of ``x`` is one call's work."""
    return x.numel() <= tiles.MAX_NUMEL


def standardize_by(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps)``, with one mean and variance a channel, tile by tile."""

    def call(part: Tensor, tile: Tile) -> list[Tensor]:
        here = slice(*tile[1].own)
        return [F.batch_norm(part, mean[here], var[here], eps=eps)]

    return run_by_tiles(x, Work(call, tuple(map(Each, x.shape)), outermost_first(x)))[0]


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel; of no elements both are 0."""
    if not _is_native(x):
        mean, var = moments_over(x, _all_but_channels(x))
        return mean.flatten(), var.flatten()
    parts = _parts(x)
    found = [torch.batch_norm_update_stats(part, None, None, 0.0) for part in parts]
    if len(parts) == 1:
        return found[0]
    means, variances = (torch.stack(each) for each in zip(*found, strict=True))
    shares = [torch.full_like(means[0], p.numel() / x.numel()) for p in parts]
    return merged_moments(torch.stack(shares), means, variances)


def moments_over(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over ``dims``, which are kept. Of no elements both are 0."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    if x.is_cuda and 0 < x.numel() <= tiles.TILE_NUMEL:
        var, mean = torch.var_mean(x.to(wide), dims, correction=0, keepdim=True)
        return mean, var
    count = max(1, math.prod(x.shape[dim] for dim in dims))
    mean = x.sum(dims, keepdim=True, dtype=wide) / count
    # Around the mean: a sum of plain squares would cancel.
    return mean, sum_chunks(_squared_distance, dims, wide, x, mean) / count


def merged_moments(shares: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a whole from those of its parts, which are stacked in dim 0.

    ``shares`` says which part of all elements each part has.
    """
    mean = (shares * means).sum(0)
    apart = means - mean
    return mean, (shares * torch.addcmul(variances, apart, apart)).sum(0)


def merged_statistics(stacked: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and ``1 / sqrt(variance + eps)`` of each channel of a whole.

    ``stacked[i]`` has part ``i``'s share of all elements, its means and its variances.
    """
    is_plain = type(stacked) is Tensor and stacked.is_cuda and stacked.dtype == torch.float32
    if is_plain and fused.is_measured(stacked.device):
        return merge_by_kernel(stacked, eps)
    mean, var = merged_moments(*stacked.unbind(1))
    return mean, var, torch.rsqrt(var + eps)


def merge_by_kernel(stacked: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``merged_statistics`` in one kernel: these tensors are small."""
    found = [stacked.new_empty(stacked.shape[2]) for _ in range(3)]
    _merge_launch(stacked.shape, eps, stacked.device)(stacked.contiguous(), *found)
    return found[0], found[1], found[2]


@lru_cache(maxsize=1024)
def _merge_launch(shape: torch.Size, eps: float, device: torch.device) -> fused.Launch:
    from hyperslab.kernels.gpu.moments import merge_moments_kernel

    num_parts, _, num_channels = shape
    grid, constants = (-(-num_channels // 128),), {"eps": eps, "BLOCK": 128}
    return fused.Launch(merge_moments_kernel, grid, device, (num_parts, num_channels), constants)


def normalize(
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: RowsBeside = (0, 0),
) -> Tensor:
    """``(x - mean) * scale * weight + bias``, in the dtype and memory format of ``x``.

    One sample, channels last, may have ``rows`` of memory beside it.
    """
    weight, bias = _like(weight, mean), _like(bias, mean)
    if _is_native(x):
        has_rows = any(rows) and x.shape[0] == 1 and x.ndim in (4, 5)
        out = empty_with_rows(x.shape, rows, x.dtype, x.device) if has_rows else torch.empty_like(x)
        for part, made in zip(_parts(x), _parts(out), strict=True):
            torch.batch_norm_elemt(part, weight, bias, mean, scale, 0.0, out=made)
        return out
    scale = scale if weight is None else scale * weight
    bias = torch.zeros_like(mean) if bias is None else bias
    return map_chunks(_normalized, x, *_per_channel(x, mean, scale, bias))


def in_memory_of(x: Tensor, grad: Tensor) -> Tensor:
    """``grad``, copied if it must lie in memory as ``x`` does for the functions below."""
    if not _is_native(x) or _has_channels_last(grad):
        return grad
    return torch.empty_like(x).copy_(grad)


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of ``grad`` and of ``grad * (x - mean)``."""
    if not _is_native(x):
        dims, wide = _all_but_channels(x), mean.dtype
        distances = sum_chunks(_with_distance, dims, wide, grad, x, *_per_channel(x, mean))
        return grad.sum(dims, dtype=wide), distances.flatten()
    wants = True, False, False
    found = [
        torch.batch_norm_backward_reduce(grads, part, mean, scale, None, *wants)[:2]
        for grads, part in zip(_parts(grad), _parts(x), strict=True)
    ]
    for others in found[1:]:
        for total, other in zip(found[0], others, strict=True):
            total.add_(other)
    return found[0]


def input_gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the ``x`` that was normalized.

    ``sums`` are those of ``gradient_sums`` over all elements of a channel, and ``count``, of one
    element, is their number by what they were divided.
    """
    weight = _like(weight, mean)
    if not _is_native(x):
        means = sums / count
        slope = means[1] * scale.square()
        scale = scale if weight is None else scale * weight
        return map_chunks(_input_gradient, grad, x, *_per_channel(x, means[0], mean, slope, scale))
    given = mean, scale, weight, *sums, count
    pairs = list(zip(_parts(grad), _parts(x), strict=True))
    if len(pairs) == 1:
        home = torch.batch_norm_backward_elemt(*pairs[0], *given)
        return home.view(x.movedim(1, -1).shape).movedim(-1, 1)
    home = torch.empty_like(x)
    for pair, made in zip(pairs, _parts(home), strict=True):
        made.copy_(torch.batch_norm_backward_elemt(*pair, *given))
    return home


def _is_native(x: Tensor) -> bool:
    return x.numel() > 0 and _has_kernels(x) and _has_channels_last(x)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _NATIVE and type(x) is Tensor  # with memory, not in a graph


def _has_channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Rows with the channels of a voxel each, few enough for kernels that count with 32 bits."""
    num_channels = x.shape[1]
    rows = x.movedim(1, -1).view(-1, num_channels)
    if x.numel() <= tiles.TILE_NUMEL:
        return (rows,)
    parts: tuple[Tensor, ...] = rows.split(max(1, tiles.TILE_NUMEL // num_channels))
    return parts


def _like(t: Tensor | None, mean: Tensor) -> Tensor | None:
    return None if t is None else t.to(mean.dtype).contiguous()


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _per_channel(x: Tensor, *numbers: Tensor) -> list[Tensor]:
    """``numbers`` that broadcast to ``x``."""
    return [t.view(1, -1, *[1] * (x.ndim - 2)) for t in numbers]


def _squared_distance(x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean).square_()


def _normalized(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias, x - mean, scale)


def _with_distance(grad: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean).mul_(grad)


def _input_gradient(
    grad: Tensor, x: Tensor, mean_grad: Tensor, mean: Tensor, slope: Tensor, scale: Tensor
) -> Tensor:
    return torch.addcmul(grad - mean_grad, x - mean, slope, value=-1).mul_(scale)


Slices = tuple[slice, ...]


def map_chunks(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """What the pointwise ``function`` makes of tensors that broadcast to ``x``, in its dtype."""
    chunks = _chunks(x)
    if not chunks:
        return function(x, *others).to(x.dtype)
    out = torch.empty_like(x)
    for chunk in chunks:
        out[chunk] = function(x[chunk], *(_part(t, chunk) for t in others))
    return out


def sum_chunks(
    function: Callable[..., Tensor],
    dims: tuple[int, ...],
    dtype: torch.dtype,
    x: Tensor,
    *others: Tensor,
) -> Tensor:
    """The sum over ``dims``, which are kept, of what ``map_chunks`` would make."""
    chunks = _chunks(x)
    if not chunks:
        return function(x, *others).sum(dims, keepdim=True, dtype=dtype)
    shape = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
    total = torch.zeros(shape, dtype=dtype, device=x.device)
    for chunk in chunks:
        made = function(x[chunk], *(_part(t, chunk) for t in others))
        _part(total, chunk).add_(made.sum(dims, keepdim=True, dtype=dtype))
    return total


def _chunks(x: Tensor) -> list[Slices]:
    """The slices of ``x`` that are taken one by one; none where that would gain nothing."""
    limit = tiles.TILE_NUMEL
    if x.numel() <= limit or torch.is_grad_enabled():  # autograd would keep all temporaries
        return []
    return [own_of(t) for t in pick_tiles(tuple(map(Each, x.shape)), outermost_first(x), limit)]


def _part(t: Tensor, chunk: Slices) -> Tensor:
    """The part of ``t`` that is broadcast to ``chunk``."""
    slices = [slice(None) if n == 1 else one for n, one in zip(t.shape, chunk, strict=True)]
    return t[tuple(slices)]
