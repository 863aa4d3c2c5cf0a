"""Transposed convolutions in 1 to 3 dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.errors import LayoutError
from hyperslab.kernels.conv import Convolution
from hyperslab.kernels.torch_conv import is_avoided
from hyperslab.layout import Layout, TransposedWindow, plan_windows
from hyperslab.nn.align import check_operands
from hyperslab.nn.registry import register
from hyperslab.nn.rules.spatial import (
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


def _make_conv_transpose(num_dims: int) -> None:
    function = getattr(F, f"conv_transpose{num_dims}d")

    @register(function)
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
