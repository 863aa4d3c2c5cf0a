"""Normalisations: of a batch, of groups and layers, of instances, and local responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.reduce import reduce_sum
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.dist_ops.norm import Ends, Moments, normalize_channels, standardize
from hyperslab.dist_ops.window_conv import rows_beside
from hyperslab.errors import ConfigError, LayoutError
from hyperslab.kernels.norm import fits, standardize_by
from hyperslab.layout import Exchange, Grid, Layout, Span, plan_exchange
from hyperslab.nn.align import check_input, layout_of_channels, localize, of_channels
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.reduce.reductions import widened
from hyperslab.nn.placement import move, recut, whole_along
from hyperslab.nn.slab import Slab


def _per_channel(t: Tensor, ndim: int) -> Tensor:
    return t.view(-1, *[1] * (ndim - 2))


def _is_affine(weight: Tensor | None, bias: Tensor | None) -> bool:
    return weight is not None or bias is not None


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x * weight + bias``, in ``x``'s dtype, as torch's norms give it; ``x`` without both."""
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _affine_per_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    ends = [None if t is None else _per_channel(t, x.ndim) for t in (weight, bias)]
    return _affine(x, *ends)


Vector = Slab | Tensor | None
"""One number for each channel: on every rank, or cut as weights are."""


def _check_channels(function: Any, input: Slab | Tensor, *per_channel: Vector) -> Slab:
    """``input``, if there is one number a channel in each of the others.

    Ranks that hold nothing would not see the local norm refuse.
    """
    x = check_input(function, input)
    if x.ndim < 2:
        raise LayoutError(f"{function.__name__} wants at least 2 dims, got shape {tuple(x.shape)}")
    for t in per_channel:
        if t is not None and tuple(t.shape) != x.layout.shape[1:2]:
            raise LayoutError(
                f"{function.__name__}: {tuple(t.shape)} is not one number for each channel of an "
                f"input of shape {tuple(x.shape)}"
            )
    return x


@torch.no_grad()
def _update(running: Slab | Tensor, new: Tensor, x: Slab, momentum: float) -> None:
    """Has ``running`` follow ``new``, the statistics of the channels that this rank holds of ``x``.

    Collective over the ranks that hold other channels, where ``running`` is not cut as ``x`` is.
    """
    found, own = x.with_local(new, layout_of_channels(x)), running
    if isinstance(running, Slab):
        own = getattr(running.local, "copied_from", running)
    if isinstance(own, Slab) and own.mesh.grid != x.mesh.grid:
        found = move(found, own.mesh, own.layout)
    elif isinstance(own, Slab):
        found = recut(found, own.layout)
    else:
        found = whole_along(found, [0])
    piece = own.local if isinstance(own, Slab) else own
    piece.lerp_(found.local.to(piece.dtype), momentum)


def _lies_as_channels(running: Vector, x: Slab) -> bool:
    """Whether a rank has just the numbers of the channels that it has of ``x``."""
    if isinstance(running, Slab):
        is_copy = hasattr(running.local, "copied_from")
        return running.layout == layout_of_channels(x) and not is_copy
    return running is None or x.layout.splits[1] is None


def _by_running(
    function: Any,
    x: Slab,
    running_mean: Vector,
    running_var: Vector,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Slab:
    """``x`` standardised by running statistics."""
    mean, var = of_channels(x, running_mean), of_channels(x, running_var)
    if mean is None or var is None:
        raise ConfigError(f"{function.__name__} needs running statistics where it uses no others")
    if fits(x.local) and x.local.shape[1]:
        return x.with_local(F.batch_norm(x.local, mean, var, weight, bias, eps=eps))
    local = standardize_by(x.local, mean, var, eps)
    return x.with_local(_affine_per_channel(local, weight, bias))


@define("reducing", F.batch_norm)
def batch_norm(
    x: Slab,
    running_mean: Vector,
    running_var: Vector,
    weight: Vector = None,
    bias: Vector = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Slab:
    """Batch norm over the global batch, or over one spatial group where the mesh says so."""
    x = _check_channels(F.batch_norm, x, running_mean, running_var, weight, bias)
    weight, bias = of_channels(x, weight), of_channels(x, bias)
    if not training:
        return _by_running(F.batch_norm, x, running_mean, running_var, weight, bias, eps)
    dims = (0, *range(2, x.ndim))
    over = dims[1:] if x.mesh.batch_stats == "spatial" else dims
    axes = x.layout.axes_of(over)
    lies = _lies_as_channels(running_mean, x) and _lies_as_channels(running_var, x)
    if not axes and fits(x.local) and lies and x.local.shape[1]:
        statistics = of_channels(x, running_mean), of_channels(x, running_var)
        return x.with_local(F.batch_norm(x.local, *statistics, weight, bias, True, momentum, eps))
    num_samples = x.layout.shape[0] if 0 in over else x.local.shape[0]
    count = num_samples * math.prod(x.layout.shape[2:])
    if count == 1:
        raise ValueError(
            f"expected more than 1 value per channel when training, got {tuple(x.shape)}"
        )
    if not count:
        return x.with_local(_affine_per_channel(x.local, weight, bias))

    def update(mean: Tensor, var: Tensor) -> None:
        if running_mean is not None:
            _update(running_mean, mean.flatten(), x, momentum)
        if running_var is not None:
            _update(running_var, var.flatten() * (count / (count - 1)), x, momentum)

    return x.with_local(_normalized(x, (weight, bias), Moments(dims, axes, count), eps, update))


def _normalized(
    x: Slab, ends: Ends, moments: Moments, eps: float, update: Callable[[Tensor, Tensor], None]
) -> Tensor:
    if not torch.compiler.is_compiling():
        rows = rows_beside(x.box, x.mesh)
        return normalize_channels(x.local, ends, moments, eps, x.mesh, update, rows)
    # Of functions that compilers know how to differentiate.
    local, mean, var = standardize(x.local, moments, eps, x.mesh, inner=_is_affine(*ends))
    update(mean, var)
    return _affine_per_channel(local, *ends)


@define("reducing", F.instance_norm)
def instance_norm(
    x: Slab,
    running_mean: Vector = None,
    running_var: Vector = None,
    weight: Vector = None,
    bias: Vector = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Slab:
    """Instance norm over the whole of every sample."""
    x = _check_channels(F.instance_norm, x, running_mean, running_var, weight, bias)
    weight, bias = of_channels(x, weight), of_channels(x, bias)
    if not use_input_stats:
        return _by_running(F.instance_norm, x, running_mean, running_var, weight, bias, eps)
    count = math.prod(x.layout.shape[2:])
    if count == 1:
        raise ValueError(
            f"expected more than 1 spatial element when training, got {tuple(x.shape)}"
        )
    if not count:
        return x.with_local(_affine_per_channel(x.local, weight, bias))
    dims = range(2, x.ndim)
    axes = x.layout.axes_of(dims)
    if (
        not axes
        and running_mean is None
        and running_var is None
        and fits(x.local)
        and x.local.numel()
    ):
        return x.with_local(F.instance_norm(x.local, None, None, weight, bias, True, momentum, eps))
    moments, inner = Moments(tuple(dims), axes, count), _is_affine(weight, bias)
    local, mean, var = standardize(x.local, moments, eps, x.mesh, inner=inner)
    # Only with running statistics, or ranks that have samples (above) would not take part.
    if running_mean is not None:
        _update(running_mean, _sample_mean(mean, x), x, momentum)
    if running_var is not None:
        _update(running_var, _sample_mean(var, x) * (count / (count - 1)), x, momentum)
    return x.with_local(_affine_per_channel(local, weight, bias))


def _sample_mean(stat: Tensor, x: Slab) -> Tensor:
    """The mean of a statistic of every sample and channel over the global batch."""
    total = reduce_sum(stat.sum(0).flatten(), x.mesh, x.layout.axes_of([0]))
    return total / x.layout.shape[0]


@define("reducing", F.group_norm, torch.group_norm)
def group_norm(
    x: Slab,
    num_groups: int,
    weight: Vector = None,
    bias: Vector = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Slab:
    """Group norm over the whole of every sample's groups of channels."""
    x = _check_channels(F.group_norm, x, weight, bias)
    channels = x.layout.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise LayoutError(f"{channels} channels do not divide into {num_groups} groups")
    each = channels // num_groups
    ends = of_channels(x, weight), of_channels(x, bias)
    cut = x.layout.splits[1]
    if cut and any(bound % each for bound in cut.cuts.bounds):
        return _norm_of_cut_groups(x, each, num_groups, ends, eps)
    num_samples, num_mine = x.local.shape[0], x.box.spans[1].size // max(1, each)
    axes = x.layout.axes_of(range(2, x.ndim))
    if not axes and fits(x.local) and num_mine:
        return x.with_local(F.group_norm(x.local, num_mine, *ends, eps))
    count = each * math.prod(x.layout.shape[2:])
    if not count:
        return x.with_local(_affine_per_channel(x.local, *ends))
    grouped = x.local.reshape(num_samples, num_mine, each, *x.local.shape[2:])
    moments = Moments(tuple(range(2, grouped.ndim)), axes, count)
    local = standardize(grouped, moments, eps, x.mesh, inner=_is_affine(*ends))[0]
    return x.with_local(_affine_per_channel(local.view(x.local.shape), *ends))


def _norm_of_cut_groups(x: Slab, each: int, num_groups: int, ends: Ends, eps: float) -> Slab:
    """Where ranks share groups of ``each`` channels: from sums for each group over all of them."""
    axes = x.layout.axes_of(range(1, x.ndim))
    count = max(1, each * math.prod(x.layout.shape[2:]))
    start, stop = x.box.spans[1]
    group = torch.arange(start, stop, device=x.device) // each
    spatial = tuple(range(2, x.ndim))
    wide = widened(x.local)

    def means(values: Tensor) -> Tensor:
        """Over its group, of each sample and channel."""
        sums = values.new_zeros(values.shape[0], num_groups)
        sums = sums.index_add(1, group, values.sum(spatial) if spatial else values)
        found = reduce_sum(sums, x.mesh, axes).index_select(1, group) / count
        return found.view(*found.shape, *[1] * len(spatial))

    centred = wide - means(wide)
    local = centred * torch.rsqrt(means(centred.square()) + eps)
    return x.with_local(_affine_per_channel(local.to(x.dtype), *ends))


@define("reducing", F.layer_norm, torch.layer_norm)
def layer_norm(
    x: Slab,
    normalized_shape: Sequence[int],
    weight: Vector = None,
    bias: Vector = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Slab:
    """Layer norm over the last dims; their weights are cut as the dims are."""
    x = check_input(F.layer_norm, x)
    dims = _last_dims(F.layer_norm, x, normalized_shape, weight, bias)
    axes = x.layout.axes_of(dims)
    ends = [None if t is None else localize(t, x.layout, x.box) for t in (weight, bias)]
    if not axes and fits(x.local):
        shape = list(normalized_shape)
        return x.with_local(F.layer_norm(x.local, shape, ends[0], ends[1], eps))
    moments = Moments(dims, axes, math.prod(normalized_shape))
    local = standardize(x.local, moments, eps, x.mesh, inner=_is_affine(*ends))[0]
    return x.with_local(_affine(local, *ends))


def _last_dims(
    function: Any, x: Slab, normalized_shape: Sequence[int], *weights: Vector
) -> tuple[int, ...]:
    """The dims of ``normalized_shape``, if those of ``x`` and of the weights are such."""
    num, fits = len(normalized_shape), tuple(normalized_shape)
    name = function.__name__
    if not 0 < num <= x.ndim or fits != x.layout.shape[x.ndim - num :]:
        raise LayoutError(f"{name} over {fits} does not fit the shape {tuple(x.shape)}")
    for t in weights:
        if t is not None and tuple(t.shape) != fits:
            raise LayoutError(f"{name} over {fits} with a weight of shape {tuple(t.shape)}")
    return tuple(range(x.ndim - num, x.ndim))


@define("reducing", F.rms_norm, torch.rms_norm)
def rms_norm(
    x: Slab, normalized_shape: Sequence[int], weight: Vector = None, eps: float | None = None
) -> Slab:
    """``x`` divided by the root of its mean square over the last dims."""
    x = check_input(F.rms_norm, x)
    dims = _last_dims(F.rms_norm, x, normalized_shape, weight)
    axes = x.layout.axes_of(dims)
    factor: Tensor | None = localize(weight, x.layout, x.box)
    if not axes:
        return x.with_local(F.rms_norm(x.local, list(normalized_shape), factor, eps))
    wide = widened(x.local)
    squares = reduce_sum(wide.square().sum(dims, keepdim=True), x.mesh, axes)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    local = (wide * torch.rsqrt(squares / math.prod(normalized_shape) + eps)).to(x.dtype)
    return x.with_local(_affine(local, factor, None))


@define("reducing", F.local_response_norm)
def local_response_norm(
    x: Slab, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Slab:
    """The local norm of each piece, with the channels beside it where channels are split."""
    if not x.is_floating_point():
        raise unsupported(F.local_response_norm, x, "its numbers are not floating point")
    if x.ndim < 2 or not x.layout.splits[1]:
        return x.with_local(F.local_response_norm(x.local, size, alpha, beta, k))
    exchange = _plan_beside(x.mesh.grid, x.mesh.rank, x.layout, size // 2, (size - 1) // 2)
    window = fetch(x.local, exchange, x.mesh)
    if not exchange.owned:
        return x.with_local(empty_output(exchange.owned.shape, window))
    local = F.local_response_norm(window, size, alpha, beta, k)
    return x.with_local(local.narrow(1, size // 2, x.local.shape[1]))


@lru_cache(maxsize=256)
def _plan_beside(grid: Grid, rank: int, source: Layout, below: int, above: int) -> Exchange:
    """How ``rank`` gets its piece with channels beside it; none where it has none."""
    boxes = [source.box(coords) for coords in grid.coords]
    wanted = [
        box.with_span(1, Span(box.spans[1].start - below, box.spans[1].stop + above))
        if box
        else box
        for box in boxes
    ]
    return plan_exchange(grid, rank, source, wanted)
