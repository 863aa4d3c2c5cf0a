"""Convolutions with few input channels, by fused kernels: they wait for activation and pool."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.kernels import conv_pool, fused
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.kernels.conv import Settings, conv_few_channels
from hyperslab.layout import Window
from hyperslab.nn.align import check_operands
from hyperslab.nn.deferred import Convolved, defer_conv
from hyperslab.nn.op import Call, FusedRule, fuse
from hyperslab.nn.ops.windows.conv import plan_conv
from hyperslab.nn.ops.windows.spatial import (
    autocast_dtype,
    check_extents,
    check_spatial,
    check_weights,
)
from hyperslab.nn.slab import Slab


def _pays(call: Call) -> bool:
    x = call.input
    return type(x) is Slab and x.ndim == len(call.windows) + 2 and fused.pays(x.local)


def _defer(call: Call) -> Slab | None:
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

    def run(slope: float) -> Tensor:
        return conv_few_channels(piece, kernel, shift, plan.padding, slope=slope)

    def run_pool(slope: float, pool: Pool) -> Tensor | None:
        if not conv_pool.pays(piece, kernel, plan.padding):
            return None
        if not conv_pool.is_supported(piece, kernel, plan.padding, slope, pool):
            return None
        return conv_pool.conv_and_pool(piece, kernel, shift, plan.padding, slope, pool)

    operands = [t for t in (piece, kernel, shift) if t is not None]
    if any(t.is_inference() for t in operands):  # nobody could tell whether they were written into
        return x.with_local(run(1.0), plan.output)
    return defer_conv(x, plan.output, Convolved(run, run_pool, operands))


fuse(FusedRule("few channels", _pays, _defer), F.conv2d, F.conv3d)
