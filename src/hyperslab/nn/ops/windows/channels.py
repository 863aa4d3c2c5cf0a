"""Convolutions of split channels, or by weights that are cut along channels or filters.

Such a convolution is one of plain pieces between two messages at most. *Filter split*: a rank
fetches the channels that its filters read. *Channel split*: a rank convolves the channels it has,
and what ranks made of each filter is added where the filter belongs. In between, ranks that share
channels and filters convolve as ever, halos included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch, reduce_scatter
from hyperslab.dist_ops.channel_product import ConvProduct, gather_product, scatter_product
from hyperslab.dist_ops.choices import hides_channels
from hyperslab.dist_ops.cut_weight import undivided
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.kernels.conv import Convolution
from hyperslab.layout import (
    Exchange,
    Groups,
    Layout,
    Span,
    Split,
    TransposedWindow,
    cut_in_chunks,
    plan_gather_channels,
    plan_scatter_filters,
    plan_windows,
)
from hyperslab.nn.align import localize
from hyperslab.nn.op import Call
from hyperslab.nn.ops.windows.spatial import autocast, check_batch, check_weights
from hyperslab.nn.placement import recut, whole_along
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import is_traced

Convolve = Callable[[Call], Slab]
"""What convolves a Slab of whole channels by plain weights."""


def has_cut_channels(call: Call) -> bool:
    """Whether ranks hold other channels of the input, or other weights."""
    x, weight, bias = call.operands
    if isinstance(weight, Slab) or isinstance(bias, Slab):
        return True
    return isinstance(x, Slab) and x.ndim > 1 and x.layout.splits[1] is not None


class _Cut(NamedTuple):
    """How the weight of a convolution is cut."""

    dim: int
    split: Split
    keeps_filters: bool
    """Whether a rank has all that its filters need; else all that its channels need."""


def convolve_cut(call: Call, convolve: Convolve) -> Slab:
    """The convolution of a ``call`` for which ``has_cut_channels`` holds."""
    function, (x, weight, bias) = call.op.function, call.operands
    if not isinstance(x, Slab):  # a plain tensor and cut weights
        like = weight if isinstance(weight, Slab) else bias
        x = like.with_local(x, Layout.unsplit(x.shape))
    check_batch(function, x, len(call.windows))
    transposed = isinstance(call.windows[0], TransposedWindow)
    num, (first, second) = call.options["groups"], weight.shape[:2]
    channels, filters = (first, second * num) if transposed else (second * num, first)
    check_weights(function, x, weight, bias, (channels, filters), num)
    groups = Groups(channels, filters, num)
    cut = _cut_of(weight, x, groups, transposed=transposed)
    if cut is None:
        whole = [_whole(t) for t in (weight, bias)]
        return convolve(call.on(x, *whole))
    x, weight, bias = autocast(x, weight, bias)
    x = whole_along(x, [d for d in x.layout.split_dims if d != 1 and _axis(x, d) == cut.split.axis])
    piece = _piece_of_weight(weight, cut, x)
    run = _keep_filters if cut.keeps_filters else _keep_channels
    return run(call.on(x, piece, bias), convolve, cut, groups)


def _axis(x: Slab, dim: int) -> str:
    return cast(Split, x.layout.splits[dim]).axis


def _whole(t: Slab | Tensor | None) -> Tensor | None:
    return whole_along(t, t.layout.split_dims).local if isinstance(t, Slab) else t


def _cut_of(weight: Slab | Tensor, x: Slab, groups: Groups, *, transposed: bool) -> _Cut | None:
    """As the weight is cut along one of its first dims; else so that ranks keep filters.

    Several groups of a transposed convolution are cut along channels, the dim that knows groups.
    None where nothing is cut.
    """
    filters_dim = 1 if transposed else 0
    usual = 0 if groups.num > 1 else filters_dim
    found = weight.layout.splits if isinstance(weight, Slab) else ()
    for dim in (usual, 1 - usual) if groups.num == 1 else (usual,):
        if dim < len(found) and (split := found[dim]):
            return _Cut(dim, split, dim == filters_dim)
    axes = [split.axis for split in (*found, x.layout.splits[1]) if split]
    if not axes:
        return None
    split = Split(axes[0], cut_in_chunks(weight.shape[usual], x.mesh.grid.size(axes[0])))
    return _Cut(usual, split, usual == filters_dim)


def _piece_of_weight(weight: Slab | Tensor, cut: _Cut, x: Slab) -> Tensor:
    shape = tuple(weight.shape)
    target = Layout.unsplit(shape).with_dim(cut.dim, shape[cut.dim], cut.split)
    piece: Tensor = localize(weight, target, target.box(x.mesh.coords))
    return piece


def _bias_for(bias: Slab | Tensor | None, filters: Split, x: Slab) -> Tensor | None:
    if bias is None:
        return None
    target = Layout((bias.shape[0],), (filters,))
    piece: Tensor = localize(bias, target, target.box(x.mesh.coords))
    return piece


def _keep_filters(call: Call, convolve: Convolve, cut: _Cut, groups: Groups) -> Slab:
    x: Slab
    x, weight, bias = call.operands
    mine, mesh = cut.split.cuts.spans[x.mesh.coords[cut.split.axis]], x.mesh
    bias = _bias_for(bias, cut.split, x)
    exchange = plan_gather_channels(mesh.grid, mesh.rank, x.layout, groups, cut.split)
    layout = _output(call, x.layout, groups.filters, cut.split, x)
    if (product := _product(call, x, weight, exchange, groups)) is not None:
        local = gather_product(x.local, *undivided(weight), exchange, product, mesh)
        return x.with_local(_shifted(local, bias), layout)
    held, piece = groups.reads(mine), fetch(x.local, exchange, mesh)
    parts = []
    for run in groups.runs_of_filters(mine):
        channels = piece[:, run.channels.slice_from(held.start)]
        filters = run.filters.slice_from(mine.start)
        kernel = weight.narrow(cut.dim, filters.start, run.filters.size)
        shift = None if bias is None else bias[filters]
        parts.append(_convolve_part(call, convolve, x, channels, kernel, shift, run.num_groups))
    if parts:
        return x.with_local(_joined(parts), layout)
    shape = layout.box(mesh.coords).shape
    return x.with_local(empty_output(shape, piece, weight, bias), layout)


def _keep_channels(call: Call, convolve: Convolve, cut: _Cut, groups: Groups) -> Slab:
    x, weight, bias = call.operands
    x = recut(x, x.layout.with_dim(1, groups.channels, cut.split))
    mine, mesh = x.box.spans[1], x.mesh
    num = cut.split.cuts.num
    filters = Split(cut.split.axis, cut_in_chunks(groups.filters, num))
    layout = _output(call, x.layout, groups.filters, filters, x)
    exchange = plan_scatter_filters(mesh.grid, mesh.rank, layout, groups, cut.split)
    bias = _bias_for(bias, filters, x)
    if (product := _product(call, x, weight, exchange, groups)) is not None:
        local = scatter_product(x.local, *undivided(weight), exchange, product, mesh)
        return x.with_local(_shifted(local, bias), layout)
    parts = []
    for run in groups.runs_of_channels(mine):
        place = run.channels.slice_from(mine.start)
        kernel = weight.narrow(cut.dim, place.start, run.channels.size)
        part = _convolve_part(call, convolve, x, x.local[:, place], kernel, None, run.num_groups)
        parts.append((run.filters, part))
    if parts:
        made = _added(parts, groups.writes(mine))
    else:
        made = empty_output(exchange.wanted.shape, x.local, weight)
    return x.with_local(_shifted(reduce_scatter(made, exchange, mesh), bias), layout)


def _shifted(local: Tensor, bias: Tensor | None) -> Tensor:
    return local if bias is None else local + bias.to(local.dtype).view(-1, *[1] * (local.ndim - 2))


def _product(
    call: Call, x: Slab, weight: Tensor, exchange: Exchange, groups: Groups
) -> ConvProduct | None:
    """The convolution of pieces, where it is worth it to have messages travel meanwhile.

    None where halos are to be exchanged too: those are hidden by themselves.
    """
    options = call.options
    is_plain = groups.num == 1 and not isinstance(options["padding"], str)
    if not is_plain or any(x.layout.splits[2:]) or is_traced() or x.is_complex():
        return None
    if call.op.implementations or not x.local.numel() or not weight.numel():
        return None
    flops = 2 * groups.channels * groups.filters * weight[0, 0].numel() * x.local[:, 0].numel()
    if not hides_channels(exchange, x.local, flops / x.mesh.grid.size("channel"), x.mesh):
        return None
    ends = options.get("output_padding")
    zeros = (0,) * len(call.windows)
    return ConvProduct.of(
        Convolution(
            options["stride"],
            options["padding"],
            options["dilation"],
            ends is not None,
            ends or zeros,
            1,
        )
    )


def _convolve_part(
    call: Call,
    convolve: Convolve,
    x: Slab,
    channels: Tensor,
    kernel: Tensor,
    shift: Tensor | None,
    num_groups: int,
) -> Tensor:
    """The pieces ``channels`` of ranks that have the same ones, convolved as if they were all."""
    layout = x.layout.with_dim(1, channels.shape[1])
    part = convolve(call.on(x.with_local(channels, layout), kernel, shift, groups=num_groups))
    return part.local


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _added(parts: list[tuple[Span, Tensor]], filters: Span) -> Tensor:
    """Parts of ``filters``: each has some of them, and two may have the same ones."""
    if len(parts) == 1:
        return parts[0][1]
    total: Tensor | None = None
    for span, part in parts:
        beside = [span.start - filters.start, filters.stop - span.stop]
        padded = F.pad(part, [0, 0] * (part.ndim - 2) + beside)
        total = padded if total is None else total + padded
    return cast(Tensor, total)


def _output(call: Call, source: Layout, num_filters: int, filters: Split, x: Slab) -> Layout:
    """The layout of the output, whose ``filters`` are cut."""
    windows = (None, None, *call.windows)
    planned = plan_windows(x.mesh.grid, x.mesh.rank, source.whole_along([1]), windows)
    return planned.output.with_dim(1, num_filters, filters)
