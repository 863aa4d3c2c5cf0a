"""Pixels moved between channels and spatial dims, and channels in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, Split, Window, cut_in_chunks, plan_windows
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.windows.spatial import scaled
from hyperslab.nn.placement import recut
from hyperslab.nn.slab import Slab


def _check(function: Callable[..., Any], x: Slab) -> None:
    if x.ndim < 3 or not x.numel():
        raise unsupported(function, x, "images have at least 3 dims, and pixels")


@define("shape", torch.pixel_shuffle, F.pixel_shuffle)
def pixel_shuffle(x: Slab, upscale_factor: int) -> Slab:
    """Each pixel's channels as a square of pixels, so that pieces grow and stay where they are.

    Split channels move first, so that all of a square are on one rank.
    """
    factor = upscale_factor
    _check(torch.pixel_shuffle, x)
    if factor < 1 or x.shape[-3] % factor**2:
        raise LayoutError(
            f"pixel_shuffle: squares of {factor} pixels cannot be made of {x.shape[-3]} channels"
        )
    channels, num = x.ndim - 3, x.shape[-3] // factor**2
    made = x.layout.splits[channels]
    if made:
        made = Split(made.axis, cut_in_chunks(num, made.cuts.num))
        x = recut(x, x.layout.with_dim(channels, x.shape[-3], scaled(made, factor**2)))
    layout = x.layout.with_dim(channels, num, made)
    for dim in (x.ndim - 2, x.ndim - 1):
        layout = layout.with_dim(dim, x.shape[dim] * factor, scaled(x.layout.splits[dim], factor))
    return _moved(torch.pixel_shuffle, x, x.local, factor, layout)


@define("shape", torch.pixel_unshuffle, F.pixel_unshuffle)
def pixel_unshuffle(x: Slab, downscale_factor: int) -> Slab:
    """Each square of pixels as the channels of one; squares that are cut move to one rank."""
    factor = downscale_factor
    _check(torch.pixel_unshuffle, x)
    if factor < 1 or any(n % factor for n in x.shape[-2:]):
        raise LayoutError(
            f"pixel_unshuffle: squares of {factor} pixels do not fill a shape of {tuple(x.shape)}"
        )
    square = Window(factor, factor)
    windows = (*(None,) * (x.ndim - 2), square, square)
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, windows)
    channels = scaled(x.layout.splits[-3], factor**2)
    layout = planned.output.with_dim(x.ndim - 3, x.shape[-3] * factor**2, channels)
    window = fetch(x.local, planned.exchange, x.mesh)
    return _moved(torch.pixel_unshuffle, x, window, factor, layout)


def _moved(
    function: Callable[..., Tensor], x: Slab, window: Tensor, factor: int, layout: Layout
) -> Slab:
    """The local shuffle, which leaves empty pieces as they are."""
    shape = layout.box(x.mesh.coords).shape
    return x.with_local(
        function(window, factor) if 0 not in shape else empty_output(shape, window), layout
    )


def _make_channel_shuffle(function: Callable[..., Any]) -> None:
    @define("shape", function)
    def channel_shuffle(x: Slab, groups: int) -> Slab:
        """The channels in another order."""
        _check(function, x)
        channels = x.shape[1]
        if not x.layout.splits[1] or groups < 1 or channels % groups:
            return x.with_local(function(x.local, groups))
        order = torch.arange(channels, device=x.device).view(groups, -1).t().flatten()
        return x.index_select(1, order)  # type: ignore[no-any-return]


for _function in {torch.channel_shuffle, F.channel_shuffle, torch.native_channel_shuffle}:
    _make_channel_shuffle(_function)
