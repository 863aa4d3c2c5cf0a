"""Convolutions with few input channels, as the first of a network are, by fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.kernels import few_channels, fused
from hyperslab.nn.align import check_operands
from hyperslab.nn.deferred import defer_conv
from hyperslab.nn.nothing import nothing
from hyperslab.nn.registry import register, rule_of
from hyperslab.nn.rules.conv import conv_windows, plan_conv
from hyperslab.nn.rules.spatial import (
    autocast_dtype,
    check_extents,
    check_spatial,
    check_weights,
    per_dim,
)
from hyperslab.nn.slab import Slab


def _make_rule(num_dims: int) -> None:
    function = getattr(F, f"conv{num_dims}d")
    alone = rule_of(function)

    @register(function)
    def conv(
        input: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Any:
        if type(input) is Slab and input.ndim == num_dims + 2 and fused.pays(input.local):
            steps = (*per_dim(stride, num_dims), *per_dim(dilation, num_dims))
            if _has_kernel(input.local, weight, steps, groups):
                pads = padding if isinstance(padding, str) else per_dim(padding, num_dims)
                return _convolve(function, input, weight, bias, pads)
        return alone(input, weight, bias, stride, padding, dilation, groups)


def _has_kernel(x: Tensor, weight: Any, steps: tuple[int, ...], groups: int) -> bool:
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return False
    dtype = autocast_dtype(weight)
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    is_exact = dtype == torch.float32 and precision != "tf32"
    return not is_exact and few_channels.is_supported(x, weight, dtype, steps, groups)


def _convolve(
    function: Callable[..., Any],
    input: Slab,
    weight: Tensor,
    bias: Tensor | None,
    padding: str | tuple[int, ...],
) -> Slab:
    x = check_spatial(function, check_operands(function, input, weight, bias), input.ndim - 2)
    check_weights(function, x, weight, bias, (weight.shape[1], weight.shape[0]), 1)
    ones = (1,) * (x.ndim - 2)
    windows = conv_windows(tuple(weight.shape[2:]), ones, padding, ones)
    plan = plan_conv(x.mesh.grid, x.mesh.rank, x.layout, windows, weight.shape[0])
    check_extents(function, x, plan.output)
    dtype = autocast_dtype(weight)
    kernel, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    window = fetch(x.local, plan.exchange, x.mesh)
    if not plan.box:
        return x.with_local(nothing(plan.box.shape, kernel, shift), plan.output)

    def run(slope: float) -> Tensor:
        return few_channels.conv_few_channels(window, kernel, shift, plan.padding, slope=slope)

    return defer_conv(x, plan.output, run, [window, kernel, shift])


for _num_dims in (2, 3):
    _make_rule(_num_dims)
