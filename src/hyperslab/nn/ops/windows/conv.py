"""Convolutions and transposed convolutions in 1 to 3 dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.dist_ops import halo_conv
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.dist_ops.halo_conv import HaloConv
from hyperslab.errors import LayoutError
from hyperslab.kernels.conv import Convolution, Settings
from hyperslab.kernels.torch_conv import is_avoided
from hyperslab.layout import (
    Box,
    Exchange,
    Grid,
    HaloPlan,
    Layout,
    TransposedWindow,
    Window,
    local_padding,
    plan_halo,
    plan_windows,
)
from hyperslab.nn.align import check_operands
from hyperslab.nn.op import define
from hyperslab.nn.ops.windows.spatial import (
    autocast,
    autocast_dtype,
    check_extents,
    check_spatial,
    check_steps,
    check_weights,
    per_dim,
    without_samples,
)
from hyperslab.nn.slab import Slab


@dataclass(frozen=True, slots=True)
class _ConvPlan:
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
) -> _ConvPlan:
    ends = [
        w.extra if cut is None else 0 for w, cut in zip(windows, source.splits[2:], strict=True)
    ]
    for dim, end in enumerate(ends, start=2):
        source = source.with_dim(dim, source.shape[dim] + end, source.splits[dim])
    windows = tuple(replace(w, extra=w.extra - end) for w, end in zip(windows, ends, strict=True))
    planned = plan_windows(grid, rank, source, (None, None, *windows))
    output = planned.output.with_dim(1, num_filters)
    return _ConvPlan(
        [n for end in reversed(ends) for n in (0, end)] if any(ends) else None,
        planned.exchange,
        output.box(grid.coords[rank]),
        local_padding(source, windows),
        plan_halo(grid, rank, source, windows),
        output,
    )


@lru_cache(maxsize=4096)
def conv_windows(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Window, ...]:
    if padding == "same":
        if any(step != 1 for step in stride):
            raise LayoutError("padding='same' is not supported for strided convolutions")
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(
            Window(k, 1, total // 2, d, extra=total % 2)
            for k, d, total in zip(kernel, dilation, totals, strict=True)
        )
    if isinstance(padding, str) and padding != "valid":
        raise LayoutError(f"padding must be 'same', 'valid' or numbers, got {padding!r}")
    pads = (0,) * len(kernel) if isinstance(padding, str) else padding
    check_steps(stride, pads, dilation)
    return tuple(map(Window, kernel, stride, pads, dilation))


def _make_conv(num_dims: int) -> None:
    function = getattr(F, f"conv{num_dims}d")

    @define("windowed", function)
    @without_samples(num_dims)
    def conv(
        input: Slab,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Slab:
        x = check_spatial(function, check_operands(function, input, weight, bias), num_dims)
        steps, dilations = per_dim(stride, num_dims), per_dim(dilation, num_dims)
        pads = padding if isinstance(padding, str) else per_dim(padding, num_dims)
        check_weights(
            function, x, weight, bias, (weight.shape[1] * groups, weight.shape[0]), groups
        )
        settings = Settings(steps, dilations, groups)
        if not any(x.layout.splits[2:]) and _is_one_call(x.local, weight, pads, settings):
            local = function(x.local, weight, bias, steps, pads, dilations, groups)
            shape = (x.layout.shape[0], *local.shape[1:])
            return x.with_local(local, Layout(shape, x.layout.splits))
        windows = conv_windows(tuple(weight.shape[2:]), steps, pads, dilations)
        plan = plan_conv(x.mesh.grid, x.mesh.rank, x.layout, windows, weight.shape[0])
        check_extents(function, x, plan.output)
        x, weight, bias = autocast(x, weight, bias)
        return x.with_local(_run_conv(x, weight, bias, plan, settings), plan.output)


def _is_one_call(
    x: Tensor, weight: Tensor, padding: str | tuple[int, ...], settings: Settings
) -> bool:
    """Whether torch's own function is what there is to do, forward and backward."""
    is_replaced = settings.is_replaced(x, weight, autocast_dtype(weight))
    return not is_replaced and settings.fits(x, weight, padding)


def _run_conv(
    x: Slab, weight: Tensor, bias: Tensor | None, plan: _ConvPlan, settings: Settings
) -> Tensor:
    local = F.pad(x.local, plan.end_pads) if plan.end_pads else x.local
    hides = not plan.exchange.idle and not local.is_complex()
    if plan.halo and hides and plan.halo.min_numel >= halo_conv.MIN_INTERIOR_NUMEL:
        return _halo_conv(local, weight, bias, plan.halo, settings, x.mesh)
    window = fetch(local, plan.exchange, x.mesh)
    if plan.box:
        return settings.run(window, weight, bias, plan.padding)
    return empty_output(plan.box.shape, window, weight, bias)


_halo_conv: Callable[..., Tensor] = HaloConv.apply


for _num_dims in (1, 2, 3):
    _make_conv(_num_dims)


def _make_conv_transpose(num_dims: int) -> None:
    function = getattr(F, f"conv_transpose{num_dims}d")

    @define("windowed", function)
    @without_samples(num_dims)
    def conv_transpose(
        input: Slab,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> Slab:
        x = check_spatial(function, check_operands(function, input, weight, bias), num_dims)
        settings = [per_dim(v, num_dims) for v in (stride, padding, output_padding, dilation)]
        steps, pads, output_pads, dilations = settings
        out_channels = weight.shape[1] * groups
        check_weights(function, x, weight, bias, (weight.shape[0], out_channels), groups)
        convolution = Convolution(steps, pads, dilations, True, output_pads, groups)
        is_own = not is_avoided(x.local, weight, autocast_dtype(weight))
        if is_own and not any(x.layout.splits[2:]) and convolution.fits(x.local, weight):
            local = function(x.local, weight, bias, steps, pads, output_pads, groups, dilations)
            shape = (x.layout.shape[0], *local.shape[1:])
            return x.with_local(local, Layout(shape, x.layout.splits))
        check_steps(steps, (*pads, *output_pads), dilations)
        if any(o >= max(s, d) for s, o, d in zip(steps, output_pads, dilations, strict=True)):
            raise LayoutError(
                "output padding must be smaller than either stride or dilation, got "
                f"{output_pads} with stride {steps} and dilation {dilations}"
            )
        numbers = weight.shape[2:], steps, pads, dilations, output_pads
        windows = tuple(map(TransposedWindow, *numbers))
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
            local = local.narrow(dim, own.start - written.start, own.size)
    return x.with_local(local, layout)


for _num_dims in (1, 2, 3):
    _make_conv_transpose(_num_dims)
