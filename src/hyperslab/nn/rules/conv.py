"""Convolutions and transposed convolutions in 1 to 3 dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import ConfigError, LayoutError
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
from hyperslab.nn import halo_conv
from hyperslab.nn.align import check_operands
from hyperslab.nn.halo_conv import HaloConv, Settings
from hyperslab.nn.nothing import nothing
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab


def per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """One value a dim, as torch reads an argument that may be a number, or a list of one or all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    if len(values) not in (1, num_dims):
        raise LayoutError(f"{values} should be one number, or one for each of {num_dims} dims")
    return values * num_dims if len(values) == 1 else values


def check_steps(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int] = (1,)
) -> None:
    """Raises where torch would refuse these numbers."""
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise LayoutError(
            "stride and dilation must be at least 1 and padding at least 0, got stride "
            f"{tuple(stride)}, dilation {tuple(dilation)} and padding {tuple(padding)}"
        )


def _check_weights(
    function: Callable[..., Any],
    x: Slab,
    weight: Tensor,
    bias: Tensor | None,
    channels: tuple[int, int],
    groups: int,
) -> None:
    """Raises where torch would refuse the weights; ``channels`` are those they take and give.

    Before any message, and also on ranks that own no output and never run the local operator.
    """
    wants, gives = channels
    unlike = bias is not None and tuple(bias.shape) != (gives,)
    if weight.ndim != x.ndim or wants != x.shape[1] or weight.shape[0] % groups or unlike:
        raise LayoutError(
            f"{function.__name__}: a weight of shape {tuple(weight.shape)}, a bias of shape "
            f"{None if bias is None else tuple(bias.shape)} and groups={groups} do not fit an input "
            f"of shape {tuple(x.shape)}"
        )
    dtypes = [t.dtype for t in (x, weight, bias) if t is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise ConfigError(
            f"{function.__name__}: input, weight and bias must have one dtype, got "
            f"{', '.join(map(str, dtypes))}"
        )


def autocast(x: Slab, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The operands as autocast casts those of a plain convolution, where it is on.

    Cast before the exchange, halos travel in the short dtype too.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, *tensors)
    )


def check_spatial(function: Callable[..., Any], x: Slab, num_dims: int) -> Slab:
    """``x``, if it has a sample dim and a whole channel dim before its spatial dims."""
    if x.ndim != num_dims + 2:
        raise unsupported(
            function, x, f"it has {x.ndim} dims, and batched input has {num_dims + 2}"
        )
    if x.layout.splits[1]:
        raise unsupported(function, x, "its channels are split")
    return x


def check_extents(function: Callable[..., Any], x: Slab, layout: Layout) -> None:
    """Raises, on all ranks alike, where the output would have no elements along a dim."""
    if min(layout.shape[2:]) < 1 and min(x.layout.shape[2:]) >= 1:
        raise LayoutError(
            f"{function.__name__}: the kernel does not fit the padded input of shape {tuple(x.shape)}; "
            f"the output would have shape {layout.shape}"
        )


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
def _plan_conv(
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
def _conv_windows(
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

    @register(function)
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
        _check_weights(
            function, x, weight, bias, (weight.shape[1] * groups, weight.shape[0]), groups
        )
        if not any(x.layout.splits[2:]):
            local = function(x.local, weight, bias, steps, pads, dilations, groups)
            shape = (x.layout.shape[0], *local.shape[1:])
            return x.with_local(local, Layout(shape, x.layout.splits))
        windows = _conv_windows(tuple(weight.shape[2:]), steps, pads, dilations)
        plan = _plan_conv(x.mesh.grid, x.mesh.rank, x.layout, windows, weight.shape[0])
        check_extents(function, x, plan.output)
        settings = Settings(steps, dilations, groups)
        x, weight, bias = autocast(x, weight, bias)
        return x.with_local(_run_conv(x, weight, bias, plan, settings), plan.output)


def _run_conv(
    x: Slab, weight: Tensor, bias: Tensor | None, plan: _ConvPlan, settings: Settings
) -> Tensor:
    local = F.pad(x.local, plan.end_pads) if plan.end_pads else x.local
    busy = not plan.exchange.idle
    if plan.halo and busy and local.numel() >= halo_conv.MIN_INTERIOR_NUMEL:
        return _halo_conv(local, weight, bias, plan.halo, settings, x.mesh)
    window = fetch(local, plan.exchange, x.mesh)
    if plan.box:
        return settings.run(window, weight, bias, plan.padding)
    return nothing(plan.box.shape, window, weight, bias)


_halo_conv: Callable[..., Tensor] = HaloConv.apply


def _make_conv_transpose(num_dims: int) -> None:
    function = getattr(F, f"conv_transpose{num_dims}d")

    @register(function)
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
        _check_weights(function, x, weight, bias, (weight.shape[0], out_channels), groups)
        if not any(x.layout.splits[2:]):
            local = function(x.local, weight, bias, steps, pads, output_pads, groups, dilations)
            shape = (x.layout.shape[0], *local.shape[1:])
            return x.with_local(local, Layout(shape, x.layout.splits))
        check_steps(steps, (*pads, *output_pads), dilations)
        for step, more, dilated in zip(steps, output_pads, dilations, strict=True):
            if more >= max(step, dilated):
                raise LayoutError(
                    f"output padding must be smaller than either stride or dilation, got {output_pads} "
                    f"with stride {steps} and dilation {dilations}"
                )
        windows = tuple(
            map(TransposedWindow, weight.shape[2:], steps, pads, dilations, output_pads)
        )
        planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
        check_extents(function, x, planned.output)
        x, weight, bias = autocast(x, weight, bias)
        window = fetch(x.local, planned.exchange, x.mesh)
        layout = planned.output.with_dim(1, out_channels)
        if not planned.box:
            shape = (*planned.box.shape[:1], out_channels, *planned.box.shape[2:])
            return x.with_local(nothing(shape, window, weight, bias), layout)
        # Along split dims the window is written out in full and the rank's outputs taken from it.
        whole = [split is None for split in x.layout.splits[2:]]
        local = function(
            window,
            weight,
            bias,
            steps,
            [pad if keep else 0 for pad, keep in zip(pads, whole, strict=True)],
            [pad if keep else 0 for pad, keep in zip(output_pads, whole, strict=True)],
            groups,
            dilations,
        )
        for dim, (keep, w) in enumerate(zip(whole, windows, strict=True), start=2):
            if not keep:
                own = planned.box.spans[dim]
                written = w.writes(planned.exchange.wanted.spans[dim])
                local = local.narrow(dim, own.start - written.start, own.size)
        return x.with_local(local, layout)


for _num_dims in (1, 2, 3):
    _make_conv(_num_dims)
    _make_conv_transpose(_num_dims)
