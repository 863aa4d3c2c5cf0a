"""Max, average and power-average pools in 1 to 3 dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.graph import cached_constants
from hyperslab.errors import LayoutError
from hyperslab.kernels.pool import (
    avg_pool as local_avg_pool,
    global_indices,
    max_pool as local_max_pool,
)
from hyperslab.layout import (
    Box,
    Layout,
    Span,
    UnpaddedStart,
    Window,
    Windowed,
    plan_windows,
)
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.windows.spatial import (
    check_batch,
    check_extents,
    check_steps,
    no_outputs,
    per_dim,
    result_dtype,
    without_samples,
)
from hyperslab.nn.slab import Slab


def pool_windows(
    x: Slab,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    *,
    ceil: bool,
) -> tuple[Window, ...]:
    """The windows along the spatial dims."""
    num_dims = x.ndim - 2
    kernels = per_dim(kernel, num_dims)
    none = stride is None or (isinstance(stride, Sequence) and not stride)
    strides = kernels if none else per_dim(stride, num_dims)  # type: ignore[arg-type]
    numbers = kernels, strides, per_dim(padding, num_dims), per_dim(dilation, num_dims)
    return _make_windows(*numbers, x.layout.shape[2:] if ceil else None)


@lru_cache(maxsize=1024)
def _make_windows(
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
    overhung: tuple[int, ...] | None,
) -> tuple[Window, ...]:
    """The windows; those of dims with the extents ``overhung`` may reach beyond the padding."""
    check_steps((*kernels, *strides), pads, dilations)
    if any(not 0 <= 2 * pad <= k for pad, k in zip(pads, kernels, strict=True)):
        raise LayoutError(f"pool padding must be at most half the kernel, got {pads} for {kernels}")
    windows = map(Window, kernels, strides, pads, dilations)
    if overhung is None:
        return tuple(windows)
    return tuple(_overhang(w, n) for w, n in zip(windows, overhung, strict=True))


def _overhang(window: Window, extent: int) -> Window:
    """``window`` with a last output that may reach beyond the padding, if it starts before it."""
    stride, pad = window.stride, window.padding
    num = -((window.reach + 1 - extent - 2 * pad) // stride) + 1
    if (num - 1) * stride >= extent + pad:
        num -= 1
    short = (num - 1) * stride + window.reach + 1 - extent - 2 * pad
    return replace(window, extra=max(0, short))


@lru_cache(maxsize=1024)
def unpadded(windows: tuple[Window, ...]) -> tuple[UnpaddedStart, ...]:
    """The windows of a max pool.

    It takes the first of a window's numbers if all are lowest, so padding must not come first.
    """
    return tuple(UnpaddedStart(w.kernel, w.stride, w.padding, w.dilation, w.extra) for w in windows)


def _fetch_window(
    function: Callable[..., Any], x: Slab, windows: tuple[Window, ...], fill: float
) -> tuple[Tensor, Windowed]:
    """The inputs of this rank's outputs, and the plan."""
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    check_extents(function, x, planned.output)
    return fetch(x.local, planned.exchange, x.mesh, fill=fill), planned


def _no_outputs(function: Callable[..., Any], x: Slab, window: Tensor, planned: Windowed) -> Tensor:
    return no_outputs(planned.box.shape, window, result_dtype(lambda t: function(t, 1), x))


def _make_max_pool(num_dims: int) -> None:
    function = getattr(F, f"max_pool{num_dims}d")
    name = f"max_pool{num_dims}d_with_indices"
    both = [getattr(space, name, None) for space in (F, torch, torch._C._nn)]

    @define("windowed", function, getattr(torch, f"max_pool{num_dims}d"))
    @without_samples(num_dims)
    def max_pool(
        input: Slab,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Slab | tuple[Slab, Slab]:
        x = check_batch(function, input, num_dims)
        windows = unpadded(pool_windows(x, kernel_size, stride, padding, dilation, ceil=ceil_mode))
        lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        window, planned = _fetch_window(function, x, windows, lowest)
        if planned.box:
            pads = pads_at_start(x.layout, windows, planned.box)
            args = (window, kernel_size, stride, pads, dilation, ceil_mode)
            found = local_max_pool(*args, return_indices)
            out, indices = found if return_indices else (found, found)
        else:
            out = _no_outputs(function, x, window, planned)
            indices = torch.empty_like(out, dtype=torch.int64)
        values = x.with_local(as_many(out, planned.box.shape), planned.output)
        if not return_indices:
            return values
        starts = [span.start for span in planned.exchange.wanted.spans[2:]]
        flat = global_indices(indices, window.shape[2:], starts, x.layout.shape[2:])
        return values, x.with_local(as_many(flat, planned.box.shape), planned.output)

    @define("windowed", *filter(None, both))
    def max_pool_with_indices(
        input: Slab,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> Slab | tuple[Slab, Slab]:
        """``max_pool`` and, whatever ``return_indices`` says, the indices."""
        return max_pool(input, kernel_size, stride, padding, dilation, ceil_mode, True)


def pads_at_start(source: Layout, windows: Sequence[UnpaddedStart], outputs: Box) -> list[int]:
    """What the local pool pads: before the tensor's start, and the whole of dims that are whole."""
    dims = zip(windows, outputs.spans[2:], source.splits[2:], strict=True)
    return [w.padding_before(span) if split else w.padding for w, span, split in dims]


def as_many(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of ``x``: padding at both ends makes outputs that are not wanted."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def _make_avg_pool(num_dims: int) -> None:
    function = getattr(F, f"avg_pool{num_dims}d")

    @define("windowed", function)
    @without_samples(num_dims)
    def avg_pool(
        input: Slab,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Slab:
        x = check_batch(function, input, num_dims)
        if not x.is_floating_point():
            raise unsupported(function, x, "its numbers are not floating point")
        if divisor_override == 0:
            raise LayoutError("divisor_override must not be 0")
        windows = pool_windows(x, kernel_size, stride, padding, ceil=ceil_mode)
        window, planned = _fetch_window(function, x, windows, 0.0)
        if not planned.box:
            return x.with_local(_no_outputs(function, x, window, planned), planned.output)
        splits = x.layout.splits[2:]
        if not any(splits):
            numbers = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
            return x.with_local(local_avg_pool(window, *numbers), planned.output)
        pads = [0 if split else w.padding for split, w in zip(splits, windows, strict=True)]
        if divisor_override is not None or not any(w.padding or w.extra for w in windows):
            numbers = kernel_size, stride, pads, ceil_mode, True, divisor_override
            local = local_avg_pool(window, *numbers)
            return x.with_local(local, planned.output)
        sums = _sum_pool(window, windows, pads, ceil=ceil_mode)
        spans, extents = planned.box.spans[2:], x.layout.shape[2:]
        kind = sums.dtype, sums.device
        counts = _counts(windows, spans, extents, *kind, inside=not count_include_pad)
        return x.with_local(sums / counts, planned.output)


def _sum_pool(x: Tensor, windows: Sequence[Window], pads: list[int], *, ceil: bool) -> Tensor:
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    if len(windows) == 1:  # avg_pool1d has no divisor_override
        row = (1, *kernel), (1, *stride), (0, *pads)
        return local_avg_pool(x[:, :, None], *row, ceil, divisor_override=1)[:, :, 0]
    return local_avg_pool(x, kernel, stride, pads, ceil, divisor_override=1)


@cached_constants
def _counts(
    windows: tuple[Window, ...],
    outputs: tuple[Span, ...],
    extents: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    inside: bool,
) -> Tensor:
    """How many inputs each output averages: all as far as padding goes, or those ``inside``."""
    total = torch.ones(())
    for window, span, extent in zip(windows, outputs, extents, strict=True):
        start = torch.arange(span.start, span.stop) * window.stride - window.padding
        stop = (start + window.kernel).clamp(max=extent + window.padding)
        if inside:
            start, stop = start.clamp(min=0), stop.clamp(max=extent)
        total = total[..., None] * (stop - start)
    return total.to(device, dtype)


_KNOWS_MAX_NORM = float(F.lp_pool1d(torch.full((1, 1, 1), 3.0), math.inf, 1)) == 3
"""Whether this version of torch takes infinite powers for largest and smallest values."""


def _make_lp_pool(num_dims: int) -> None:
    function = getattr(F, f"lp_pool{num_dims}d")
    max_pool = getattr(F, f"max_pool{num_dims}d")
    avg_pool = getattr(F, f"avg_pool{num_dims}d")

    @define("windowed", function)
    def lp_pool(
        input: Slab,
        norm_type: float,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        ceil_mode: bool = False,
    ) -> Slab:
        """The root of the sum of powers, made of the average of powers as torch makes it."""
        x: Any = input
        if norm_type == math.inf and _KNOWS_MAX_NORM:
            return max_pool(x.abs(), kernel_size, stride, 0, 1, ceil_mode)  # type: ignore[no-any-return]
        if norm_type == -math.inf and _KNOWS_MAX_NORM:
            return -max_pool(-x.abs(), kernel_size, stride, 0, 1, ceil_mode)  # type: ignore[no-any-return]
        means = avg_pool(x.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        # This is the mean itself, but for its gradient, which is zero where the mean is.
        mean = means.local.sign() * F.relu(means.local.abs())
        sums = mean * math.prod(per_dim(kernel_size, num_dims))
        return means.with_local(sums.pow(1.0 / norm_type))  # type: ignore[no-any-return]


for _num_dims in (1, 2, 3):
    _make_max_pool(_num_dims)
    _make_avg_pool(_num_dims)
    _make_lp_pool(_num_dims)
