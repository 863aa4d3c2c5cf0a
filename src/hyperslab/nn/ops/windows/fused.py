"""Rules of fused kernels: convolution, activation and pool in one pass over memory.

Convolutions with few input channels wait for the activation and the pool after them, and pools take
what waited for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.dist_ops import choices
from hyperslab.dist_ops.conv_pool import conv_and_pool
from hyperslab.dist_ops.halo_pool import PoolPlan, halo_pool, plan_pool
from hyperslab.kernels import act_pool, conv_pool, fused
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.kernels.conv import Settings, conv_few_channels
from hyperslab.layout import (
    Box,
    Grid,
    Layout,
    Window,
    Windowed,
    local_padding,
    plan_conv_pool,
    plan_halo,
    plan_windows,
)
from hyperslab.nn.align import check_operands
from hyperslab.nn.deferred import (
    POOLS,
    Convolved,
    Deferred,
    defer_conv,
    defer_pool,
    pooled,
    split_pooled,
    unactivated,
)
from hyperslab.nn.op import Call, FusedRule, fuse
from hyperslab.nn.ops.windows.channels import has_cut_channels
from hyperslab.nn.ops.windows.conv import plan_conv, run_conv
from hyperslab.nn.ops.windows.pool import as_many, avg_pool, max_pool, pads_at_start, unpadded
from hyperslab.nn.ops.windows.spatial import (
    autocast_dtype,
    check_extents,
    check_spatial,
    check_weights,
)
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import has_saved_tensor_hooks


def _conv_pays(call: Call) -> bool:
    x = call.input
    is_batch = type(x) is Slab and x.ndim == len(call.windows) + 2
    return is_batch and fused.pays(x.local) and not has_cut_channels(call)


def _defer_conv(call: Call) -> Slab | None:
    """The output, if a kernel can make it from what is here: an exchange is better hidden."""
    function, (input, weight, bias) = call.op.function, call.operands
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return None
    dtype = autocast_dtype(weight)
    stride, _, dilation, groups = call.options.values()
    ones = (1,) * (input.ndim - 2)
    if not Settings(stride, dilation, groups).padded(ones).is_fused(input.local, weight, dtype):
        return None
    x = check_spatial(function, check_operands(function, *call.operands), input.ndim - 2)
    check_weights(function, x, weight, bias, (weight.shape[1], weight.shape[0]), 1)
    windows = cast(tuple[Window, ...], call.windows)
    plan = plan_conv(x.mesh.grid, x.mesh.rank, x.layout, windows, weight.shape[0])
    check_extents(function, x, plan.output)
    if not plan.exchange.idle or not plan.box:
        return None
    kernel, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    piece = fetch(x.local, plan.exchange, x.mesh)

    def run(slope: float, piece: Tensor, kernel: Tensor, shift: Tensor | None = None) -> Tensor:
        return conv_few_channels(piece, kernel, shift, plan.padding, slope=slope)

    def run_pool(
        slope: float, pool: Pool, piece: Tensor, kernel: Tensor, shift: Tensor | None = None
    ) -> Tensor | None:
        if piece.requires_grad or not conv_pool.pays(piece.shape, kernel, plan.padding):
            return None
        if not conv_pool.is_supported(piece.shape, kernel, plan.padding, slope, pool):
            return None
        return conv_pool.conv_and_pool(piece, kernel, shift, plan.padding, slope, pool)

    operands = [t for t in (piece, kernel, shift) if t is not None]
    if any(t.is_inference() for t in operands):  # nobody could tell whether they were written into
        return x.with_local(run(1.0, *operands), plan.output)
    return defer_conv(x, plan.output, Convolved(run, run_pool, operands))


fuse(FusedRule("few channels", _conv_pays, _defer_conv), F.conv2d, F.conv3d)


def _waits_over_ranks(call: Call) -> bool:
    x = call.input
    return (
        type(x) is Slab
        and x.ndim == len(call.windows) + 2
        and any(x.layout.splits[2:])
        and fused.defers_pieces(x.local)
        and not has_cut_channels(call)
    )


_COMPUTED_TWICE: set[object] = set()
"""Convolutions whose output was wanted besides what waited for it: these wait no more."""


def _defer_split_conv(call: Call) -> Slab | None:
    """The output, which waits for a pool: what both read is then fetched at once."""
    function, (input, weight, bias) = call.op.function, call.operands
    if type(weight) not in (Tensor, torch.nn.Parameter) or call.op.implementations:
        return None
    is_on = torch.is_autocast_enabled(weight.device.type)
    if not weight.is_floating_point() or not (is_on or input.dtype == weight.dtype):
        return None
    x = check_spatial(function, check_operands(function, *call.operands), input.ndim - 2)
    stride, _, dilation, groups = call.options.values()
    check_weights(function, x, weight, bias, (weight.shape[1] * groups, weight.shape[0]), groups)
    windows, settings = cast(tuple[Window, ...], call.windows), Settings(stride, dilation, groups)
    plan = plan_conv(x.mesh.grid, x.mesh.rank, x.layout, windows, weight.shape[0])
    check_extents(function, x, plan.output)
    key = x.layout, windows, tuple(weight.shape), x.mesh.number, has_saved_tensor_hooks()
    if plan.end_pads or key in _COMPUTED_TWICE:
        return None
    dtype = autocast_dtype(weight)
    kernel, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    operands = [t for t in (x.local, kernel, shift) if t is not None]
    if any(t.is_inference() for t in operands):  # nobody could tell whether they were written into
        return None
    num_runs = 0

    def run(slope: float, local: Tensor, kernel: Tensor, shift: Tensor | None = None) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs > 1 and not has_saved_tensor_hooks():  # a checkpoint does all once more alike
            _COMPUTED_TWICE.add(key)
        with _cast_already(kernel):
            piece = x.with_local(local.to(dtype))
            out = run_conv(call, piece, kernel, shift, plan, settings)
        return act_pool.activate(out, slope, in_place=True)

    def run_split_pool(slope: float, pool: Pool, pools: tuple[Window, ...]) -> Slab | None:
        nonlocal num_runs
        mesh = x.mesh
        chain = plan_conv_pool(mesh.grid, mesh.rank, x.layout, windows, pools, weight.shape[0])
        flops = 2 * math.prod(plan.output.shape) * weight[0].numel()
        if chain is None or not choices.joins_pool(chain, flops, mesh):
            return None
        num_runs += 1
        with _cast_already(kernel):
            out = conv_and_pool(x.local, kernel, shift, slope, pool, chain, settings, mesh)
        return Slab(out, chain.output, mesh)

    source = Convolved(run, lambda slope, pool, *operands: None, operands, run_split_pool)
    return defer_conv(x, plan.output, source)


def _cast_already(weight: Tensor) -> AbstractContextManager[None]:
    """Within it, convolutions are in the dtype of ``weight``, wherever they are computed."""
    if autocast_dtype(weight) == weight.dtype:
        return nullcontext()
    return torch.autocast(weight.device.type, enabled=False)


fuse(FusedRule("pool over ranks", _waits_over_ranks, _defer_split_conv), F.conv2d, F.conv3d)


def _pool_pays(call: Call) -> bool:
    x = call.input
    if not isinstance(x, Slab) or x.ndim != len(call.windows) + 2:
        return False
    waits = isinstance(x, Deferred) and x.source is not None
    return waits or (type(x) is Slab and fused.pays(x.local))


def _fuse_average(call: Call) -> Slab | None:
    if call.options["ceil_mode"] or "divisor_override" in call.options:
        return None
    x, counts_padding = call.input, call.options["count_include_pad"]
    if counts_padding or not any(call.options["padding"]):
        found = _pool_over_ranks(call, "avg")
        if found is not None:
            return found
    plan = _plan_average(x.mesh.grid, x.mesh.rank, x.layout, call.windows, counts_padding)
    return None if plan is None else _run(call, plan, avg_pool)


def _pool_over_ranks(call: Call, mode: Literal["avg", "max"]) -> Slab | None:
    """The pool of a convolution that waited for it, where one exchange serves both."""
    windows = cast(tuple[Window, ...], call.windows)
    if any(window.padding > window.kernel // 2 for window in windows):  # torch says what is wrong
        return None
    pads = tuple([window.padding for window in windows])
    return split_pooled(call.input, Pool(mode, *_sizes(windows), pads), windows)


class _Plan(NamedTuple):
    """How one rank pools."""

    pool: Pool
    """Of what it fetches."""
    windowed: Windowed
    fill: float
    """What is fetched from outside the tensor."""
    halo: PoolPlan | None
    """How to do without fetching all, where there is an interior and something is sent."""


@lru_cache(maxsize=1024)
def _plan_average(
    grid: Grid, rank: int, layout: Layout, windows: tuple[Window, ...], count_include_pad: bool
) -> _Plan | None:
    if not count_include_pad and any(layout.splits[2:]):  # here padding is data along split dims
        return None

    def pool(pads: Sequence[int]) -> Pool:
        return Pool("avg", *_sizes(windows), tuple(pads), count_include_pad)

    def pads(outputs: Box) -> tuple[int, ...]:
        return local_padding(layout, windows)

    return _plan(grid, rank, layout, windows, pool, pads, 0.0)


def _fuse_maximum(call: Call) -> Slab | None:
    x, options = call.input, call.options
    if options["ceil_mode"] or options.get("return_indices") or max(options["dilation"]) > 1:
        return None
    found = _pool_over_ranks(call, "max")
    if found is not None:
        return found
    plan = _plan_maximum(x.mesh.grid, x.mesh.rank, x.layout, call.windows)
    return _run(call, plan, max_pool)


@lru_cache(maxsize=1024)
def _plan_maximum(grid: Grid, rank: int, layout: Layout, windows: tuple[Window, ...]) -> _Plan:
    starts = unpadded(windows)

    def pool(pads: Sequence[int]) -> Pool:
        return Pool("max", *_sizes(windows), tuple(pads))

    def pads(outputs: Box) -> list[int]:
        return pads_at_start(layout, starts, outputs)

    return _plan(grid, rank, layout, starts, pool, pads, -math.inf)


def _plan(
    grid: Grid,
    rank: int,
    layout: Layout,
    windows: tuple[Window, ...],
    pool: Callable[[Sequence[int]], Pool],
    pads: Callable[[Box], Sequence[int]],
    fill: float,
) -> _Plan:
    """``pool`` is that with some padding, ``pads`` what is not fetched for some outputs."""
    windowed = plan_windows(grid, rank, layout, (None, None, *windows))
    halo = None if windowed.exchange.idle else plan_halo(grid, rank, layout, windows)
    found = None if halo is None else plan_pool(halo, windows, windowed.box, pool, pads, fill)
    return _Plan(pool(pads(windowed.box)), windowed, fill, found)


def _sizes(windows: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(w.kernel for w in windows), tuple(w.stride for w in windows)


def _run(call: Call, plan: _Plan, run_unfused: Callable[[Call], Any]) -> Slab | None:
    """The pooled Slab, or None where this rank has no kernel for it."""
    x, output = call.input, plan.windowed.output
    check_extents(call.op.function, x, output)
    if not plan.windowed.box:
        return None

    pool = call.on()  # which does not hold x

    def run(x: Slab) -> Tensor:
        pays = isinstance(x, Deferred) or fused.pays(x.local)
        found = _run_now(x, plan) if pays else None
        return run_unfused(pool.on(x)).local if found is None else found

    if (deferred := defer_pool(x, output, run)) is not None:
        return deferred
    out = _run_now(x, plan)
    return None if out is None else Slab(out, output, x.mesh)


def _run_now(x: Slab, plan: _Plan) -> Tensor | None:
    """The piece of the pool.

    What travels between ranks is activated: not all may have a kernel.
    """
    box, exchange = plan.windowed.box, plan.windowed.exchange
    out = pooled(x, plan.pool) if exchange.idle and exchange.stays else None
    if out is None and plan.halo:
        out = _run_halo(x, plan.halo)
    if out is None:
        piece, slope = unactivated(x) if exchange.idle else (x.local, 1.0)
        if not act_pool.is_supported(piece, slope, plan.pool):
            return None
        window: Tensor = fetch(piece, exchange, x.mesh, fill=plan.fill)
        if window is not piece and not act_pool.is_supported(window, slope, plan.pool):
            window = window.contiguous()
        out = act_pool.activate_and_pool(window, slope, plan.pool)
    return as_many(out, box.shape)


def _run_halo(x: Slab, plan: PoolPlan) -> Tensor | None:
    piece, slope = unactivated(x)
    if not act_pool.is_supported(piece, slope, plan.interior):
        return None
    return halo_pool(piece, slope, plan, x.mesh)


_AVG_POOLS = (F.avg_pool2d, F.avg_pool3d)
_MAX_POOLS = (F.max_pool2d, F.max_pool3d, torch.max_pool2d, torch.max_pool3d)
fuse(FusedRule("activation and average", _pool_pays, _fuse_average), *_AVG_POOLS)
fuse(FusedRule("activation and maximum", _pool_pays, _fuse_maximum), *_MAX_POOLS)
POOLS.update(_AVG_POOLS, _MAX_POOLS)
