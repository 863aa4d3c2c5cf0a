"""Dense layers, and numbers looked up in tensors that are whole on every rank."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch, reduce_scatter
from hyperslab.comm.reduce import reduce_sum
from hyperslab.dist_ops.channel_product import (
    DenseProduct,
    dense_product,
    gather_product,
    scatter_product,
)
from hyperslab.dist_ops.choices import hides_channels
from hyperslab.dist_ops.cut_weight import undivided
from hyperslab.errors import LayoutError
from hyperslab.layout import BlockPlan, Exchange, Layout, plan_blocks, plan_recut
from hyperslab.nn.align import localize
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.products.matmul import Names, contract, product_flops
from hyperslab.nn.ops.reduce.along import Along, run_along
from hyperslab.nn.ops.reduce.extremes import extreme_of
from hyperslab.nn.ops.reduce.reductions import widened
from hyperslab.nn.ops.windows.spatial import autocast
from hyperslab.nn.placement import whole_along
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import is_traced


@define("product", F.linear, flops=product_flops())
def linear(
    input: Slab | Tensor, weight: Slab | Tensor, bias: Slab | Tensor | None = None
) -> Slab | Tensor:
    """``input @ weight.T + bias`` along the last dim; summed over the ranks if that is split."""
    if not input.ndim or not 0 < weight.ndim < 3 or weight.shape[-1] != input.shape[-1]:
        raise LayoutError(
            f"linear: a weight of shape {tuple(weight.shape)} does not fit an input of shape "
            f"{tuple(input.shape)}"
        )
    if isinstance(weight, Slab) and weight.ndim == 2 and weight.layout.split_dims:
        return _by_blocks(input, weight, bias)
    if isinstance(bias, Slab) and isinstance(input, Slab) and not isinstance(weight, Slab):
        bias = whole_along(bias, bias.layout.split_dims).local
    if isinstance(input, Slab) and not isinstance(weight, Slab) and not isinstance(bias, Slab):
        fits = weight.ndim == 2 and (bias is None or bias.shape == weight.shape[:1])
        if fits and not input.layout.splits[-1]:  # no rank needs anything of the others
            layout = input.layout.with_dim(input.ndim - 1, weight.shape[0])
            return input.with_local(F.linear(input.local, weight, bias), layout)
    names, output = _names(input.ndim, weight.ndim)
    return contract(F.linear, (input, weight), names, output, F.linear, bias)


@lru_cache(maxsize=64)
def _names(ndim: int, weight: int) -> tuple[tuple[Names, Names], Names]:
    batch = tuple(f"batch {n}" for n in range(ndim - 1))
    out = ("out",) if weight == 2 else ()
    return ((*batch, "in"), (*out, "in")), (*batch, *out)


def _by_blocks(input: Slab | Tensor, weight: Slab, bias: Slab | Tensor | None) -> Slab:
    """The product by a weight of which each rank keeps a block: rows, columns, or both.

    A rank fetches the columns of the input that its block has, multiplies, and what ranks made of
    the same outputs is added: where samples were split over these ranks, each gets its own again;
    else, where rows are whole, each gets its share of the outputs; else its share of the samples,
    or, where other ranks share these, all.
    """
    x = input if isinstance(input, Slab) else _everywhere(input, weight)
    block, num = undivided(weight.local)
    x, weight, bias = autocast(x, weight.with_local(block), bias)
    plan = plan_blocks(x.mesh.grid, x.mesh.rank, x.layout, weight.layout)
    made = _multiplied(x, weight.local, num, plan)
    if bias is not None:
        target = Layout((weight.shape[0],), plan.output.splits[-1:])
        made += localize(bias, target, target.box(x.mesh.coords)).to(made.dtype)
    return x.with_local(made, plan.output)


def _multiplied(x: Slab, block: Tensor, num: int, plan: BlockPlan) -> Tensor:
    """What this rank owns of the product, with messages beside it where that is worth it.

    The gradient of ``block`` is divided by ``num``.
    """
    mesh, product = x.mesh, DenseProduct.of(x.ndim)
    flops = 2 * block.numel() * math.prod(x.local.shape[:-1])
    gather, scatter = plan_recut(mesh.grid, mesh.rank, x.layout, plan.input), plan.exchange

    def hides(exchange: Exchange, piece: Tensor) -> bool:
        has_work = not is_traced() and block.numel() > 0 and piece.numel() > 0
        return has_work and hides_channels(exchange, piece, flops, mesh)

    if plan.axis is None and _comes_in_columns(gather) and hides(gather, x.local):
        return gather_product(x.local, block, num, gather, product, mesh)
    window = fetch(x.local, gather, mesh)
    if scatter is not None and hides(scatter, window):
        return scatter_product(window, block, num, scatter, product, mesh)
    made = dense_product(window, block, num)
    if scatter is not None:
        return reduce_scatter(made, scatter, mesh)
    if plan.axis is not None:
        made = reduce_sum(widened(made), mesh, [plan.axis]).to(made.dtype)
    return made


def _comes_in_columns(exchange: Exchange) -> bool:
    """Whether a rank has all rows of what it wants, and gets columns alone."""
    return exchange.owned.spans[:-1] == exchange.wanted.spans[:-1]


def _everywhere(x: Tensor, like: Slab) -> Slab:
    """The Slab of a plain tensor, which is whole on every rank."""
    return like.with_local(x, Layout.unsplit(x.shape))


_LOOKED_UP = Along(lambda *_: (), others="whole", looks=True)
_ROW_BY_ROW = Along(lambda *_: -1)


@define("product", F.embedding)
def embedding(
    input: Slab | Tensor,
    weight: Slab | Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """The rows of ``weight``, whole on every rank, that ``input`` names."""
    if max_norm is not None or scale_grad_by_freq:
        slab = input if isinstance(input, Slab) else weight
        assert isinstance(slab, Slab)
        why = "max_norm and scale_grad_by_freq depend on which rows other ranks read"
        raise unsupported(F.embedding, slab, why)
    return run_along(F.embedding, _LOOKED_UP, (input, weight, padding_idx), {"sparse": sparse})


@define("product", F.one_hot)
def one_hot(tensor: Slab, num_classes: int = -1) -> Any:
    """Each number as a vector of zeros and a one; by default as long as the largest one asks."""
    x = tensor
    if num_classes == -1 and x.layout.split_dims:
        if not x.numel():
            raise LayoutError("one_hot of an empty tensor needs num_classes")
        num_classes = int(extreme_of(x, tuple(range(x.ndim)), largest=True)) + 1
    return run_along(F.one_hot, _LOOKED_UP, (x, num_classes), {})


@define("product", torch.searchsorted)
def searchsorted(sorted_sequence: Slab | Tensor, input: Any = None, **kwargs: Any) -> Any:
    """Where each number belongs in a sorted sequence: one for all, or one for each row of them."""
    values = kwargs.pop("self", input)
    if sorted_sequence.ndim == 1 and isinstance(values, Slab | Tensor):

        def search(values: Tensor, sequence: Tensor, **options: Any) -> Tensor:
            return torch.searchsorted(sequence, values, **options)

        return run_along(search, _LOOKED_UP, (values, sorted_sequence), kwargs)
    return run_along(torch.searchsorted, _ROW_BY_ROW, (sorted_sequence, values), kwargs)
