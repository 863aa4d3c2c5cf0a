"""Windows laid side by side, and images made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.errors import LayoutError
from hyperslab.layout import (
    Cuts,
    FoldedRows,
    Layout,
    Split,
    TransposedWindow,
    Window,
    check_steps,
    cut_in_chunks,
    local_padding,
    per_dim,
    plan_windows,
)
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.windows.spatial import check_batch, check_extents, scaled, without_samples
from hyperslab.nn.placement import recut
from hyperslab.nn.slab import Slab
from hyperslab.nn.view_copy import fetch_view


def _window_along(x: Slab | Tensor, options: Mapping[str, Any]) -> tuple[Window]:
    return (Window(options["size"], options["step"]),)


@define("windowed", Tensor.unfold, windows=_window_along)
def unfold_dim(x: Slab, dimension: int, size: int, step: int) -> Slab:
    """The windows of ``size`` indices along a dim, every ``step``; a last dim holds theirs."""
    if not -x.ndim <= dimension < x.ndim:
        raise IndexError(f"dim {dimension} is out of range for a tensor of {x.ndim} dims")
    dim = dimension % x.ndim
    if not 0 < size <= x.shape[dim] or step < 1:
        raise unsupported(
            Tensor.unfold, x, f"its windows of {size}, every {step}, do not fit dim {dim}"
        )
    windows = (*(None,) * dim, Window(size, step), *(None,) * (x.ndim - dim - 1))
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, windows)
    window = fetch_view(x, x.local, planned.exchange, x.layout)
    if planned.box.spans[dim].size:
        local = window.local.unfold(dim, size, step)
    else:
        local = empty_output((*planned.box.shape, size), window.local)
    shape, splits = planned.output.shape, planned.output.splits
    return window.viewed(local, Layout((*shape, size), (*splits, None)))


Numbers = int | Sequence[int]


class _Patches(NamedTuple):
    """Patches of images: what they hold along the two dims, and where they lie."""

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, *settings: Numbers) -> _Patches:
        patches = cls(*(per_dim(setting, 2) for setting in settings))
        check_steps((*patches.kernel, *patches.stride), patches.padding, patches.dilation)
        return patches

    @property
    def num_pixels(self) -> int:
        return math.prod(self.kernel)

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(map(Window, self.kernel, self.stride, self.padding, self.dilation))


def _patch_windows(x: Slab | Tensor, options: Mapping[str, Any]) -> tuple[Window, ...]:
    names = ("kernel_size", "dilation", "padding", "stride")
    return _Patches.of(*(options[name] for name in names)).windows


@define("windowed", F.unfold, windows=_patch_windows)
@without_samples(2)
def unfold(
    x: Slab, kernel_size: Numbers, dilation: Numbers = 1, padding: Numbers = 0, stride: Numbers = 1
) -> Slab:
    """The patches of images as the columns of a matrix, row after row of patches.

    Images that are split into rows make a matrix that is split into columns.
    """
    x = check_batch(F.unfold, x, 2)
    patches = _Patches.of(kernel_size, dilation, padding, stride)
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *patches.windows))
    check_extents(F.unfold, x, planned.output)
    layout = _columns(x, planned.output, patches.num_pixels)
    window, box = fetch(x.local, planned.exchange, x.mesh), layout.box(x.mesh.coords)
    if not box:
        return x.with_local(empty_output(box.shape, window), layout)
    pads = local_padding(x.layout, patches.windows)
    local = F.unfold(window, patches.kernel, patches.dilation, pads, patches.stride)
    return x.with_local(local, layout)


def _columns(x: Slab, placed: Layout, num_pixels: int) -> Layout:
    """The layout of patches as columns, from that of the patches in their places."""
    samples, channels, rows, across = placed.splits
    num_samples, num_channels, num_rows, num_across = placed.shape
    if across and (rows or num_rows > 1):
        raise unsupported(F.unfold, x, "rows of patches are split")
    return Layout(
        (num_samples, num_channels * num_pixels, num_rows * num_across),
        (samples, scaled(channels, num_pixels), scaled(rows, num_across) or across),
    )


@define("windowed", F.fold)
@without_samples(1)
def fold(
    x: Slab,
    output_size: Numbers,
    kernel_size: Numbers,
    dilation: Numbers = 1,
    padding: Numbers = 0,
    stride: Numbers = 1,
) -> Slab:
    """The images whose patches are the columns of ``x``, added where they overlap.

    A matrix that is split into columns makes images that are split into rows.
    """
    x = check_batch(F.fold, x, 1)
    patches = _Patches.of(kernel_size, dilation, padding, stride)
    height, width = per_dim(output_size, 2)
    rows = _rows(x, patches, height, width)
    x = _with_whole_patches(x, patches.num_pixels)
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, rows))
    samples, channels, split = planned.output.splits
    num_channels = x.shape[1] // patches.num_pixels
    layout = Layout(
        (x.shape[0], num_channels, height, width),
        (samples, _channels(channels, patches.num_pixels), split, None),
    )
    window, box = fetch(x.local, planned.exchange, x.mesh), layout.box(x.mesh.coords)
    if not box:
        return x.with_local(empty_output(box.shape, window), layout)
    if not split:
        return x.with_local(F.fold(window, (height, width), *patches), layout)
    own = box.spans[2]
    written = rows.rows.writes(rows.rows.reads(own))
    unpadded = patches._replace(padding=(0, patches.padding[1]))
    local = F.fold(window, (written.size, width), *unpadded)
    return x.with_local(local.narrow(2, own.start - written.start, own.size), layout)


def _with_whole_patches(x: Slab, num_pixels: int) -> Slab:
    """``x`` cut, where dim 1 is split, between the pixels of different channels."""
    split = x.layout.splits[1]
    if not split or not any(bound % num_pixels for bound in split.cuts.bounds):
        return x
    cuts = cut_in_chunks(x.shape[1] // num_pixels, split.cuts.num).scaled(num_pixels)
    return recut(x, x.layout.with_dim(1, x.shape[1], Split(split.axis, cuts)))


def _rows(x: Slab, patches: _Patches, height: int, width: int) -> FoldedRows:
    """How the rows of images read the columns of ``x``."""
    extents = (height, width)
    num_rows, num_across = (
        window.output_extent(n) for window, n in zip(patches.windows, extents, strict=True)
    )
    fits = num_rows * num_across == x.shape[2] and not x.shape[1] % patches.num_pixels
    if min(num_rows, num_across) < 1 or not fits:
        raise LayoutError(
            f"fold: {num_rows}x{num_across} patches of {patches.num_pixels} pixels make up an "
            f"image of {height}x{width}, but the input has shape {tuple(x.shape)}"
        )
    kernel, dilation, padding, stride = (setting[0] for setting in patches)
    rows = TransposedWindow(kernel, stride, padding, dilation)
    return FoldedRows(
        replace(rows, output_padding=height - rows.output_extent(num_rows)), num_across
    )


def _channels(split: Split | None, num_pixels: int) -> Split | None:
    """The split of an image's channels, from that of the pixels of its whole patches."""
    if split is None:
        return None
    return Split(split.axis, Cuts(tuple(bound // num_pixels for bound in split.cuts.bounds)))
