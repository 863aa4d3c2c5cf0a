"""A convolution, its activation and the pool after it on pieces, with one exchange for all."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import post_pieces
from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops.window_conv import rows_beside, window_conv
from hyperslab.kernels import act_pool, conv_pool, faces, pool as torch_pool
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.kernels.conv import Settings
from hyperslab.kernels.few_channels_operands import Halo
from hyperslab.layout import ConvPoolPlan, Exchange


def conv_and_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slope: float,
    pool: Pool,
    plan: ConvPoolPlan,
    settings: Settings,
    mesh: Mesh,
) -> Tensor:
    """The rank's part of the pool of the activated convolution, of whose input ``x`` is its piece.

    ``x`` is cast to the dtype of ``weight``, and what travels is cast. The padding of ``pool`` is
    the plan's; it counts in averages. Collective over ``mesh``. Which kernels compute is each
    rank's own affair. Differentiable.
    """
    extra = tuple([end - start for start, end in zip(plan.before, plan.after, strict=True)])
    pool = pool._replace(padding=plan.before, extra=extra)
    rows = rows_beside(plan.box, mesh)
    if _is_one_kernel(x, weight, slope, pool, plan, settings):
        halo = _fetch_halo(x, plan.exchange, weight, mesh)
        piece = x[plan.exchange.kept_from]
        return conv_pool.conv_and_pool(piece, weight, bias, plan.padding, slope, pool, halo, rows)
    x = x.to(weight.dtype)
    y = window_conv(x, weight, bias, plan.exchange, plan.padding, settings, mesh)
    if act_pool.is_supported(y, slope, pool):
        return act_pool.activate_and_pool(y, slope, pool, rows)
    return _pool(act_pool.activate(y, slope, in_place=True), pool, plan)


def _is_one_kernel(
    x: Tensor, weight: Tensor, slope: float, pool: Pool, plan: ConvPoolPlan, settings: Settings
) -> bool:
    shape = plan.exchange.wanted.shape
    return (
        not x.requires_grad
        and bool(plan.exchange.kept)
        and settings.padded(plan.padding).is_fused(x, weight, weight.dtype)
        and conv_pool.pays(shape, weight, plan.padding)
        and conv_pool.is_supported(shape, weight, plan.padding, slope, pool)
    )


def _fetch_halo(x: Tensor, exchange: Exchange, weight: Tensor, mesh: Mesh) -> Halo:
    """What others hold of the window, in the dtype of ``weight``."""
    sent = faces.cast(faces.pack(x, exchange.sent), weight.dtype)
    received = post_pieces(sent, exchange, weight.dtype, mesh).wait()
    sizes = zip(exchange.kept_to[2:], exchange.wanted.shape[2:], strict=True)
    lengths = tuple([(kept.start, size - kept.stop) for kept, size in sizes])
    return Halo(lengths, tuple([message.where for message in exchange.receives]), received)


def _pool(y: Tensor, pool: Pool, plan: ConvPoolPlan) -> Tensor:
    """By torch, whose pools pad both ends alike."""
    ends = zip(plan.before, plan.after, strict=True)
    pads = [n for end in [*ends][::-1] for n in end]
    if any(pads):
        y = F.pad(y, pads, value=-math.inf if pool.mode == "max" else 0.0)
    run = torch_pool.max_pool if pool.mode == "max" else torch_pool.avg_pool
    return run(y, pool.kernel, pool.stride, (0,) * len(pool.kernel))
