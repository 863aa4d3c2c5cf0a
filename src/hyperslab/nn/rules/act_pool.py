"""Pools, and the activations that waited for them, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.kernels import act_pool, fused
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.layout import Grid, Layout, Window, Windowed, plan_windows
from hyperslab.nn.deferred import POOLS, Deferred, pooled, unactivated
from hyperslab.nn.registry import register, rule_of
from hyperslab.nn.rules.pool import as_many, pads_at_start, pool_windows, unpadded
from hyperslab.nn.rules.spatial import check_extents
from hyperslab.nn.slab import Slab

Numbers = int | Sequence[int]


def _make_rule(
    function: Callable[..., Any], num_dims: int, fuse: Callable[..., Slab | None]
) -> None:
    alone = rule_of(function)

    @register(function)
    def pool(input: Any, *args: Any, **kwargs: Any) -> Any:
        out = fuse(function, input, *args, **kwargs) if _pays(input, num_dims) else None
        return alone(input, *args, **kwargs) if out is None else out

    POOLS.add(function)


def _pays(x: Any, num_dims: int) -> bool:
    if not isinstance(x, Slab) or x.ndim != num_dims + 2:
        return False
    waits = isinstance(x, Deferred) and x.source is not None
    return waits or (type(x) is Slab and fused.pays(x.local))


def _fuse_average(
    function: Callable[..., Any],
    x: Slab,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Slab | None:
    if ceil_mode or divisor_override is not None:
        return None
    windows = pool_windows(x, kernel_size, stride, padding, ceil=False)
    found = _plan_average(x.mesh.grid, x.mesh.rank, x.layout, windows, count_include_pad)
    return None if found is None else _run(function, x, *found, fill=0.0)


@lru_cache(maxsize=1024)
def _plan_average(
    grid: Grid, rank: int, layout: Layout, windows: tuple[Window, ...], count_include_pad: bool
) -> tuple[Pool, Windowed] | None:
    splits = layout.splits[2:]
    if not count_include_pad and any(splits):  # here padding is data along split dims
        return None
    pads = [0 if split else w.padding for split, w in zip(splits, windows, strict=True)]
    pool = Pool("avg", *_sizes(windows), tuple(pads), count_include_pad)
    return pool, plan_windows(grid, rank, layout, (None, None, *windows))


def _fuse_maximum(
    function: Callable[..., Any],
    x: Slab,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Slab | None:
    windows = pool_windows(x, kernel_size, stride, padding, dilation, ceil=False)
    if ceil_mode or return_indices or any(w.dilation != 1 for w in windows):
        return None
    pool, planned = _plan_maximum(x.mesh.grid, x.mesh.rank, x.layout, windows)
    return _run(function, x, pool, planned, fill=-math.inf)


@lru_cache(maxsize=1024)
def _plan_maximum(
    grid: Grid, rank: int, layout: Layout, windows: tuple[Window, ...]
) -> tuple[Pool, Windowed]:
    starts = unpadded(windows)
    planned = plan_windows(grid, rank, layout, (None, None, *starts))
    pads = pads_at_start(layout, starts, planned)
    return Pool("max", *_sizes(windows), tuple(pads)), planned


def _sizes(windows: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(w.kernel for w in windows), tuple(w.stride for w in windows)


def _run(
    function: Callable[..., Any], x: Slab, pool: Pool, planned: Windowed, *, fill: float
) -> Slab | None:
    """The pooled Slab, or None where this rank has no kernel for it."""
    check_extents(function, x, planned.output)
    is_whole = planned.exchange.idle and planned.exchange.stays and bool(planned.box)
    out = pooled(x, pool) if is_whole else None
    if out is None:
        # Not all ranks may have one: what travels between them is activated.
        piece, slope = unactivated(x) if planned.exchange.idle else (x.local, 1.0)
        if not act_pool.is_supported(piece, slope, pool) or not planned.box:
            return None
        window: Tensor = fetch(piece, planned.exchange, x.mesh, fill=fill)
        if window is not piece and not act_pool.is_supported(window, slope, pool):
            window = window.contiguous()
        out = act_pool.activate_and_pool(window, slope, pool)
    return Slab(as_many(out, planned.box.shape), planned.output, x.mesh)


for _num_dims in (2, 3):
    _make_rule(getattr(F, f"avg_pool{_num_dims}d"), _num_dims, _fuse_average)
    for _space in (F, torch):
        _make_rule(getattr(_space, f"max_pool{_num_dims}d"), _num_dims, _fuse_maximum)
