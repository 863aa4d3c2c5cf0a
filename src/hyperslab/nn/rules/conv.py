"""Convolutions and transposed convolutions in 1 to 3 dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, TransposedWindow, Window, plan_windows
from hyperslab.nn.halo_conv import HaloConv, Settings, plan_halo_conv, strip_padding
from hyperslab.nn.nothing import nothing
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab


def per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """One value a dim, as torch reads an argument that may be a number, or a list of one or all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def check_spatial(function: Callable[..., Any], x: Slab | Tensor, num_dims: int) -> Slab:
    """``x``, if it is a Slab with a sample and a channel dim before its spatial dims."""
    if not isinstance(x, Slab):
        raise TypeError(f"{function.__name__} wants a Slab as its input where another argument is one")
    if x.ndim != num_dims + 2:
        raise unsupported(function, x, f"it has {x.ndim} dims, and batched input has {num_dims + 2}")
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


def _conv_windows(
    x: Slab,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: str | Sequence[int],
    dilation: Sequence[int],
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
    pads = [0] * len(kernel) if padding == "valid" else padding
    return tuple(map(Window, kernel, stride, pads, dilation))  # type: ignore[arg-type]


def autocast(x: Slab, *tensors: Tensor | None) -> tuple[Slab, list[Tensor | None]]:
    """The operands in autocast's dtype where it is on, as it casts those of a plain convolution.

    Cast before the exchange, halos travel in the short dtype too.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    cast = [t.to(dtype) if t is not None else None for t in tensors]
    return x.with_local(x.local.to(dtype)), cast


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
        x = check_spatial(function, input, num_dims)
        stride, dilation = per_dim(stride, num_dims), per_dim(dilation, num_dims)
        if not isinstance(padding, str):
            padding = per_dim(padding, num_dims)
        windows = _conv_windows(x, tuple(weight.shape[2:]), stride, padding, dilation)
        if not any(x.layout.splits[2:]):
            local = function(x.local, weight, bias, stride, padding, dilation, groups)
            shape = (x.layout.shape[0], *local.shape[1:])
            return x.with_local(local, Layout(shape, x.layout.splits))
        x, windows = _pad_uneven(x, windows)
        return _split_conv(function, x, weight, bias, windows, Settings(stride, dilation, groups))


def _pad_uneven(x: Slab, windows: tuple[Window, ...]) -> tuple[Slab, tuple[Window, ...]]:
    """``x`` with a whole dim padded where its two ends want different padding: "same", even kernel."""
    pads = [w.extra if x.layout.splits[dim] is None else 0 for dim, w in enumerate(windows, start=2)]
    if not any(pads):
        return x, windows
    local = F.pad(x.local, [n for pad in reversed(pads) for n in (0, pad)])
    layout = x.layout
    for dim, pad in enumerate(pads, start=2):
        layout = layout.with_dim(dim, layout.shape[dim] + pad, layout.splits[dim])
    evened = tuple(
        Window(w.kernel, w.stride, w.padding, w.dilation, w.extra - pad)
        for w, pad in zip(windows, pads, strict=True)
    )
    return x.with_local(local, layout), evened


def _split_conv(
    function: Callable[..., Any],
    x: Slab,
    weight: Tensor,
    bias: Tensor | None,
    windows: tuple[Window, ...],
    settings: Settings,
) -> Slab:
    grid, rank = x.mesh.grid, x.mesh.rank
    planned = plan_windows(grid, rank, x.layout, (None, None, *windows))
    check_extents(function, x, planned.output)
    layout = planned.output.with_dim(1, weight.shape[0])
    x, (weight, bias) = autocast(x, weight, bias)  # type: ignore[assignment]
    halo_plan = plan_halo_conv(grid, rank, x.layout, windows)
    with torch.autocast(x.device.type, enabled=False):
        if halo_plan and not planned.exchange.idle:
            local = HaloConv.apply(x.local, weight, bias, halo_plan, settings, x.mesh)
        else:
            window = fetch(x.local, planned.exchange, x.mesh)
            if planned.box:
                pads = strip_padding(x.layout, windows)
                local = settings.run(window, weight, bias, pads)
            else:
                shape = (*planned.box.shape[:1], weight.shape[0], *planned.box.shape[2:])
                local = nothing(shape, window, weight, bias)
    return x.with_local(local, layout)


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
        x = check_spatial(function, input, num_dims)
        settings = [per_dim(v, num_dims) for v in (stride, padding, output_padding, dilation)]
        steps, pads, output_pads, dilations = settings
        out_channels = weight.shape[1] * groups
        if not any(x.layout.splits[2:]):
            local = function(x.local, weight, bias, steps, pads, output_pads, groups, dilations)
            shape = (x.layout.shape[0], *local.shape[1:])
            return x.with_local(local, Layout(shape, x.layout.splits))
        for step, more, dilated in zip(steps, output_pads, dilations, strict=True):
            if more >= max(step, dilated):
                raise LayoutError(
                    f"output padding must be smaller than either stride or dilation, got {output_pads} "
                    f"with stride {steps} and dilation {dilations}"
                )
        windows = tuple(map(TransposedWindow, weight.shape[2:], steps, pads, dilations, output_pads))
        planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
        check_extents(function, x, planned.output)
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
