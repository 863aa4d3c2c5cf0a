"""Convolutions and transposed convolutions in 1 to 3 dims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops import choices
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.dist_ops.halo_conv import HaloConv
from hyperslab.dist_ops.window_conv import copies_piece, window_conv
from hyperslab.errors import LayoutError
from hyperslab.kernels.conv import Convolution, Settings
from hyperslab.kernels.torch_conv import is_avoided
from hyperslab.layout import (
    Box,
    Exchange,
    Grid,
    HaloPlan,
    Layout,
    Numbers,
    TransposedWindow,
    Window,
    conv_windows,
    local_padding,
    per_dim,
    plan_halo,
    plan_windows,
    transposed_windows,
)
from hyperslab.nn.align import check_operands
from hyperslab.nn.op import Call, Op
from hyperslab.nn.ops.windows.channels import convolve_cut, has_cut_channels
from hyperslab.nn.ops.windows.spatial import (
    autocast,
    autocast_dtype,
    by_implementation,
    check_extents,
    check_spatial,
    check_weights,
    define_windowed,
)
from hyperslab.nn.slab import Slab


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """How one rank convolves."""

    end_pads: list[int] | None
    """What ``F.pad`` adds first to dims that are whole and want unlike padding at their ends."""
    exchange: Exchange
    box: Box
    """The outputs that the rank owns."""
    padding: tuple[int, ...]
    """What the local call pads."""
    halo: HaloPlan | None
    output: Layout


@lru_cache(maxsize=4096)
def plan_conv(
    grid: Grid, rank: int, source: Layout, windows: tuple[Window, ...], num_filters: int
) -> ConvPlan:
    ends = [
        w.extra if cut is None else 0 for w, cut in zip(windows, source.splits[2:], strict=True)
    ]
    for dim, end in enumerate(ends, start=2):
        source = source.with_dim(dim, source.shape[dim] + end, source.splits[dim])
    windows = tuple(replace(w, extra=w.extra - end) for w, end in zip(windows, ends, strict=True))
    planned = plan_windows(grid, rank, source, (None, None, *windows))
    output = planned.output.with_dim(1, num_filters)
    return ConvPlan(
        [n for end in reversed(ends) for n in (0, end)] if any(ends) else None,
        planned.exchange,
        output.box(grid.coords[rank]),
        local_padding(source, windows),
        plan_halo(grid, rank, source, windows),
        output,
    )


def conv_flops(call: Call) -> int:
    """Two for each multiplication and addition; those with padding count too."""
    (out,) = call.outputs()
    weight = call.operands[1]
    each = weight.numel() // max(1, weight.shape[0])
    is_transposed = isinstance(call.windows[0], TransposedWindow)
    return int(2 * each * (call.input if is_transposed else out).numel())


def _kernel(op: Op, weight: Tensor, num_dims: int) -> tuple[int, ...]:
    if weight.ndim != num_dims + 2:
        raise LayoutError(
            f"{op.function.__name__}: a weight of shape {tuple(weight.shape)} should have "
            f"{num_dims + 2} dims"
        )
    return tuple(weight.shape[2:])


def _make_conv(num_dims: int) -> None:
    def read(
        op: Op,
        input: Slab | Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: str | Numbers = 0,
        dilation: Numbers = 1,
        groups: int = 1,
    ) -> Call:
        steps, dilations = per_dim(stride, num_dims), per_dim(dilation, num_dims)
        pads = padding if isinstance(padding, str) else per_dim(padding, num_dims)
        windows = conv_windows(_kernel(op, weight, num_dims), steps, pads, dilations)
        options = {"stride": steps, "padding": pads, "dilation": dilations, "groups": groups}
        return Call(op, (input, weight, bias), options, windows)

    function = getattr(F, f"conv{num_dims}d")
    define_windowed(num_dims, function, reader=read, run=_conv, flops=conv_flops)


def _conv(call: Call) -> Slab:
    if has_cut_channels(call):
        return convolve_cut(call, _conv)
    function, (_, weight, bias) = call.op.function, call.operands
    x = check_spatial(function, check_operands(function, *call.operands), len(call.windows))
    stride, padding, dilation, groups = call.options.values()
    check_weights(function, x, weight, bias, (weight.shape[1] * groups, weight.shape[0]), groups)
    settings = Settings(stride, dilation, groups)
    is_torchs = not any(x.layout.splits[2:]) and not call.op.implementations
    if is_torchs and _is_one_call(x.local, weight, padding, settings):
        local = function(x.local, weight, bias, stride, padding, dilation, groups)
        shape = (x.layout.shape[0], *local.shape[1:])
        return x.with_local(local, Layout(shape, x.layout.splits))
    windows = cast(tuple[Window, ...], call.windows)
    plan = plan_conv(x.mesh.grid, x.mesh.rank, x.layout, windows, weight.shape[0])
    check_extents(function, x, plan.output)
    x, weight, bias = autocast(x, weight, bias)
    return x.with_local(run_conv(call, x, weight, bias, plan, settings), plan.output)


def _is_one_call(
    x: Tensor, weight: Tensor, padding: str | tuple[int, ...], settings: Settings
) -> bool:
    """Whether torch's own function is what there is to do, forward and backward."""
    is_replaced = settings.is_replaced(x, weight, autocast_dtype(weight))
    return not is_replaced and settings.fits(x, weight, padding)


def run_conv(
    call: Call, x: Slab, weight: Tensor, bias: Tensor | None, plan: ConvPlan, settings: Settings
) -> Tensor:
    """The rank's outputs, of operands that are cast."""
    local = F.pad(x.local, plan.end_pads) if plan.end_pads else x.local
    is_whole_call = local.is_complex() or bool(call.op.implementations)
    hides = not plan.exchange.idle and not is_whole_call
    if plan.halo and hides and _hides_exchange(plan, plan.halo, local, weight, x.mesh):
        return _halo_conv(local, weight, bias, plan.halo, settings, x.mesh)
    if plan.box and hides:
        exchange = plan.exchange
        return window_conv(local, weight, bias, exchange, plan.padding, settings, x.mesh)
    window = fetch(local, plan.exchange, x.mesh)
    if not plan.box:
        return empty_output(plan.box.shape, window, weight, bias)
    made: Tensor | None = by_implementation(call, window, weight, bias, padding=plan.padding)
    return settings.run(window, weight, bias, plan.padding) if made is None else made


_halo_conv: Callable[..., Tensor] = HaloConv.apply


def _hides_exchange(plan: ConvPlan, halo: HaloPlan, x: Tensor, weight: Tensor, mesh: Mesh) -> bool:
    flops = 2 * plan.box.numel * weight[0].numel()
    copies = copies_piece(x, plan.exchange, mesh)
    return choices.hides_exchange(halo, x, flops, mesh, copies=copies)


def _make_conv_transpose(num_dims: int) -> None:
    def read(
        op: Op,
        input: Slab | Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: Numbers = 0,
        output_padding: Numbers = 0,
        groups: int = 1,
        dilation: Numbers = 1,
    ) -> Call:
        numbers = [per_dim(v, num_dims) for v in (stride, padding, dilation, output_padding)]
        windows = transposed_windows(_kernel(op, weight, num_dims), *numbers)
        names = ("stride", "padding", "dilation", "output_padding")
        options = {**dict(zip(names, numbers, strict=True)), "groups": groups}
        return Call(op, (input, weight, bias), options, windows)

    function = getattr(F, f"conv_transpose{num_dims}d")
    define_windowed(num_dims, function, reader=read, run=_conv_transpose, flops=conv_flops)


def _conv_transpose(call: Call) -> Slab:
    if has_cut_channels(call):
        return convolve_cut(call, _conv_transpose)
    function, (_, weight, bias) = call.op.function, call.operands
    x = check_spatial(function, check_operands(function, *call.operands), len(call.windows))
    stride, padding, dilation, output_padding, groups = call.options.values()
    check_weights(function, x, weight, bias, (weight.shape[0], weight.shape[1] * groups), groups)
    convolution = Convolution(stride, padding, dilation, True, output_padding, groups)
    is_own = not is_avoided(x.local, weight, autocast_dtype(weight))
    if is_own and not any(x.layout.splits[2:]) and convolution.fits(x.local, weight):
        local = call.on(x.local, weight, bias).run()
        shape = (x.layout.shape[0], *local.shape[1:])
        return x.with_local(local, Layout(shape, x.layout.splits))
    windows = cast(tuple[TransposedWindow, ...], call.windows)
    return _split_conv_transpose(function, x, weight, bias, windows, groups)


def _split_conv_transpose(
    function: Callable[..., Tensor],
    x: Slab,
    weight: Tensor,
    bias: Tensor | None,
    windows: tuple[TransposedWindow, ...],
    groups: int,
) -> Slab:
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    check_extents(function, x, planned.output)
    x, weight, bias = autocast(x, weight, bias)
    window = fetch(x.local, planned.exchange, x.mesh)
    layout = planned.output.with_dim(1, weight.shape[1] * groups)
    box = layout.box(x.mesh.coords)
    if not box:
        return x.with_local(empty_output(box.shape, window, weight, bias), layout)
    # Along split dims all that the window adds to is computed; the rank takes its outputs from it.
    split = [cut is not None for cut in x.layout.splits[2:]]
    convolution = Convolution(
        tuple(w.stride for w in windows),
        tuple(0 if cut else w.padding for cut, w in zip(split, windows, strict=True)),
        tuple(w.dilation for w in windows),
        True,
        tuple(0 if cut else w.output_padding for cut, w in zip(split, windows, strict=True)),
        groups,
    )
    local = convolution.run(window, weight, bias)
    for dim, (cut, w) in enumerate(zip(split, windows, strict=True), start=2):
        if cut:
            own, written = box.spans[dim], w.writes(planned.exchange.wanted.spans[dim])
            if local.shape[dim] != own.size:  # the gradient of a part is copied, and contiguous
                local = local.narrow(dim, own.start - written.start, own.size)
    return x.with_local(local, layout)


for _num_dims in (1, 2, 3):
    _make_conv(_num_dims)
    _make_conv_transpose(_num_dims)
