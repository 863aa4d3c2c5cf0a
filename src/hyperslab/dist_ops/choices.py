"""Which way to compute on pieces is the fastest, by times that were measured on one H200.

``benchmarks/results`` has them: gpu_exchange for exchanges, gpu_halo for kernels on pieces.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from hyperslab.comm.mesh import Mesh
from hyperslab.layout import ConvPoolPlan, Exchange, HaloPlan

MIN_INTERIOR_NUMEL = 1 << 16
"""On CPUs, smaller pieces are better convolved in one call after the exchange."""


class Link(NamedTuple):
    """What an exchange takes."""

    seconds: float
    """However little is sent."""
    bytes_per_second: float


ON_DEVICE = Link(16e-6, 400e9)
BY_NCCL = Link(60e-6, 45e9)
"""Between nodes, from data sheets: not measured here."""
BY_HOST = Link(350e-6, 2e9)
FLOPS_PER_SECOND = 300e12
"""Of convolutions in bfloat16."""
STRIP_SECONDS = 30e-6
"""Of the calls that a strip needs, forward and backward, however thin it is."""
COPIED_BYTES_PER_SECOND = 2.1e12


def link_of(mesh: Mesh) -> Link:
    if mesh.transport is not None:
        return ON_DEVICE
    is_by_nccl = mesh.device.type == "cuda" and not mesh.stages_through_host
    return BY_NCCL if is_by_nccl else BY_HOST


def hides_exchange(plan: HaloPlan, x: Tensor, flops: float, mesh: Mesh, *, copies: bool) -> bool:
    """Whether a convolution of ``x`` is faster as an interior, during which the halo travels, and
    strips, than as one call on the piece and the halo beside it.

    One call may need ``copies`` of the piece, forward, and of its gradient; strips need calls of
    their own and compute borders twice. ``flops`` are those of the rank's outputs.
    """
    if not x.is_cuda:
        return plan.min_numel >= MIN_INTERIOR_NUMEL
    link, interior = link_of(mesh), flops / FLOPS_PER_SECOND
    nbytes = sum(math.prod(shape) for shape in plan.strip_halos.received) * x.itemsize
    exchange = link.seconds + nbytes / link.bytes_per_second
    strips = sum(math.prod(strip.shape) for strip in plan.strips) / max(1, x.numel())
    as_strips = len(plan.strips) * STRIP_SECONDS + 3 * interior * strips
    copied = 2 * x.nbytes if copies else 0
    as_one_call = 2 * min(exchange, interior) + copied / COPIED_BYTES_PER_SECOND
    return as_strips < as_one_call


def hides_channels(exchange: Exchange, x: Tensor, flops: float, mesh: Mesh) -> bool:
    """Whether a product by cut weights is faster in parts, during which messages travel.

    Each part needs calls of its own. ``flops`` are those of the whole product.
    """
    if not exchange.keeps_all or not exchange.owned or not exchange.receives:
        return False
    if not x.is_cuda:
        return exchange.owned.numel >= MIN_INTERIOR_NUMEL
    link = link_of(mesh)
    moved = exchange.wanted.numel - exchange.owned.numel
    travel = link.seconds + moved * x.itemsize / link.bytes_per_second
    own = flops / FLOPS_PER_SECOND * exchange.owned.numel / exchange.wanted.numel
    return len(exchange.receives) * STRIP_SECONDS < 2 * min(travel, own)


def joins_pool(plan: ConvPoolPlan, flops: float, mesh: Mesh) -> bool:
    """Whether a convolution and the pool after it are faster with one exchange for both.

    Ranks then compute some of the convolution's outputs twice, forward and in both gradients, and
    save an exchange either way. Where the pool needs none, the convolution's could be hidden.
    ``flops`` are those of all ranks: all choose alike.
    """
    link = link_of(mesh)
    if not plan.overlap:
        return link == ON_DEVICE
    twice = 3 * plan.overlap * flops / mesh.num_ranks / FLOPS_PER_SECOND
    return twice < 2 * link.seconds
