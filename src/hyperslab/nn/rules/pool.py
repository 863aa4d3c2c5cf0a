"""Max and average pools in 1 to 3 dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, Span, Window, Windowed, plan_windows
from hyperslab.nn.nothing import nothing
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.rules.spatial import check_extents, check_spatial, check_steps, per_dim
from hyperslab.nn.slab import Slab


def _pool_windows(
    x: Slab,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    *,
    ceil: bool,
) -> tuple[Window, ...]:
    num_dims = x.ndim - 2
    kernels = per_dim(kernel, num_dims)
    none = stride is None or (isinstance(stride, Sequence) and not stride)
    strides = kernels if none else per_dim(stride, num_dims)  # type: ignore[arg-type]
    pads, dilations = per_dim(padding, num_dims), per_dim(dilation, num_dims)
    check_steps((*kernels, *strides), pads, dilations)
    if any(not 0 <= 2 * pad <= k for pad, k in zip(pads, kernels, strict=True)):
        raise LayoutError(f"pool padding must be at most half the kernel, got {pads} for {kernels}")
    windows = list(map(Window, kernels, strides, pads, dilations))
    if ceil:
        windows = [_overhang(w, n) for w, n in zip(windows, x.layout.shape[2:], strict=True)]
    return tuple(windows)


def _overhang(window: Window, extent: int) -> Window:
    """``window`` with a last output that may reach beyond the padding, if it starts before it."""
    k, stride, pad, dilation = window.kernel, window.stride, window.padding, window.dilation
    num = -((window.reach + 1 - extent - 2 * pad) // stride) + 1
    if (num - 1) * stride >= extent + pad:
        num -= 1
    short = (num - 1) * stride + window.reach + 1 - extent - 2 * pad
    return Window(k, stride, pad, dilation, extra=max(0, short))


def _fetch_window(
    function: Callable[..., Any], x: Slab, windows: tuple[Window, ...], fill: float
) -> tuple[Tensor, Windowed, list[int]]:
    """The inputs of this rank's outputs, the plan, and the padding left for the local pool."""
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    check_extents(function, x, planned.output)
    pads = [
        0 if split else w.padding for split, w in zip(x.layout.splits[2:], windows, strict=True)
    ]
    return fetch(x.local, planned.exchange, x.mesh, fill=fill), planned, pads


def _no_outputs(function: Callable[..., Any], window: Tensor, planned: Windowed) -> Tensor:
    """The output of a rank that owns none of it, in the dtype that autocast gives the others'."""
    dtype = function(window.new_zeros((1,) * window.ndim), 1).dtype
    return nothing(planned.box.shape, window.to(dtype))


def _make_max_pool(num_dims: int) -> None:
    function = getattr(F, f"max_pool{num_dims}d")

    @register(function, getattr(torch, f"max_pool{num_dims}d"))
    def max_pool(
        input: Slab,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Slab:
        x = check_spatial(function, input, num_dims)
        if return_indices:
            raise unsupported(function, x, "return_indices=True is not supported")
        windows = _pool_windows(x, kernel_size, stride, padding, dilation, ceil=ceil_mode)
        lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        window, planned, pads = _fetch_window(function, x, windows, lowest)
        if not planned.box:
            return x.with_local(_no_outputs(function, window, planned), planned.output)
        local = function(window, kernel_size, stride, pads, dilation, ceil_mode)
        return x.with_local(local, planned.output)


def _make_avg_pool(num_dims: int) -> None:
    function = getattr(F, f"avg_pool{num_dims}d")

    @register(function)
    def avg_pool(
        input: Slab,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Slab:
        x = check_spatial(function, input, num_dims)
        if divisor_override == 0:
            raise LayoutError("divisor_override must not be 0")
        windows = _pool_windows(x, kernel_size, stride, padding, 1, ceil=ceil_mode)
        override = {} if divisor_override is None else {"divisor_override": divisor_override}
        if not any(x.layout.splits[2:]):
            local = function(
                x.local, kernel_size, stride, padding, ceil_mode, count_include_pad, **override
            )
            return x.with_local(local, Layout((x.shape[0], *local.shape[1:]), x.layout.splits))
        window, planned, pads = _fetch_window(function, x, windows, 0.0)
        if not planned.box:
            return x.with_local(_no_outputs(function, window, planned), planned.output)
        if divisor_override is not None or not any(w.padding or w.extra for w in windows):
            local = function(window, kernel_size, stride, pads, ceil_mode, True, **override)
            return x.with_local(local, planned.output)
        sums = _sum_pool(window, windows, pads, ceil=ceil_mode)
        spans, extents = planned.box.spans[2:], x.layout.shape[2:]
        counts = _counts(windows, spans, extents, inside=not count_include_pad)
        return x.with_local(sums / counts.to(sums), planned.output)


def _sum_pool(x: Tensor, windows: Sequence[Window], pads: list[int], *, ceil: bool) -> Tensor:
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    if len(windows) == 1:  # avg_pool1d has no divisor_override
        flat = F.avg_pool2d(x[:, :, None], (1, *kernel), (1, *stride), (0, *pads), ceil, True, 1)
        return flat[:, :, 0]
    pool = F.avg_pool2d if len(windows) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, pads, ceil, True, 1)


@lru_cache(maxsize=1024)
def _counts(
    windows: tuple[Window, ...],
    outputs: tuple[Span, ...],
    extents: tuple[int, ...],
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
    return total


for _num_dims in (1, 2, 3):
    _make_max_pool(_num_dims)
    _make_avg_pool(_num_dims)
