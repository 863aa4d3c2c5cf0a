"""Images sampled at points: each point may read anywhere in its channel, so images are whole."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.layout import Layout
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.placement import recut, whole_along
from hyperslab.nn.slab import Slab, check_one_grid, everywhere
from hyperslab.torch_private import is_all_true, is_any_true


@define("windowed", F.grid_sample)
def grid_sample(
    x: Slab | Tensor,
    grid: Slab | Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Slab:
    """``x`` at the points of ``grid``; samples, channels and points may be split."""
    slabs = [t for t in (x, grid) if isinstance(t, Slab)]
    check_one_grid(slab.mesh.grid for slab in slabs)
    images, points = (everywhere(t, slabs[0]) for t in (x, grid))
    if any(images.layout.splits[2:]):
        raise unsupported(F.grid_sample, images, "a point may lie on another rank")
    if images.ndim != points.ndim or images.shape[0] != points.shape[0]:
        raise RuntimeError(
            f"grid_sample of an input of shape {tuple(images.shape)} at a grid of shape "
            f"{tuple(points.shape)}: they need as many samples and dims"
        )
    points = whole_along(points, [points.ndim - 1])
    samples = points.layout.splits[0] or images.layout.splits[0]
    if samples and samples.axis in points.layout.axes_of(range(1, points.ndim)):
        raise unsupported(F.grid_sample, points, "the samples of its input are split elsewhere")
    if (channels := images.layout.splits[1]) and channels.axis in points.layout.axes:
        images, channels = whole_along(images, [1]), None
    images = recut(images, images.layout.with_dim(0, images.shape[0], samples))
    points = recut(points, points.layout.with_dim(0, points.shape[0], samples))
    layout = Layout(
        (*images.layout.shape[:2], *points.layout.shape[1:-1]),
        (samples, channels, *points.layout.splits[1:-1]),
    )
    shape = layout.box(images.mesh.coords).shape
    if 0 in shape:
        return images.with_local(empty_output(shape, images.local, points.local), layout)
    local = F.grid_sample(images.local, points.local, mode, padding_mode, align_corners)
    return images.with_local(local, layout)


@define("windowed", is_all_true)
def all_true(x: Slab) -> Tensor | Slab:
    """Whether all elements are, as distributions ask of their arguments."""
    return x.all()  # type: ignore[no-any-return]


@define("windowed", is_any_true)
def any_true(x: Slab) -> Tensor | Slab:
    """Whether any element is."""
    return x.any()  # type: ignore[no-any-return]
