"""Interpolation to another size, in 1 to 3 dims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.fetch import fetch
from hyperslab.comm.graph import cached_constants
from hyperslab.errors import LayoutError
from hyperslab.kernels import tiles
from hyperslab.kernels.interpolate import interpolate as local_interpolate
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import (
    AdaptiveWindow,
    Layout,
    Reads,
    Resampling,
    Span,
    Window,
    Windowed,
    plan_windows,
)
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.windows.spatial import along, no_outputs, result_dtype
from hyperslab.nn.slab import Slab

_NEIGHBOURS = {
    "nearest": (0, 0),
    "nearest-exact": (0, 0),
    "linear": (0, 1),
    "bilinear": (0, 1),
    "trilinear": (0, 1),
    "bicubic": (1, 2),
}
"""How many inputs an output reads before and after the one that it lies at."""


_OPTIONS = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")


def _windows(x: Slab | Tensor, options: Mapping[str, Any]) -> tuple[Reads, ...]:
    size, factor, *others = (options[name] for name in _OPTIONS)
    mode, align_corners, recompute, _ = others
    shape, num_dims = tuple(x.shape), x.ndim - 2
    sizes = _output_sizes(shape, _hashable(size), _hashable(factor), tuple(others))
    if mode == "area":
        return tuple(map(AdaptiveWindow, shape[2:], sizes))
    factors = None if factor is None or recompute else _per_dim(factor, num_dims)
    found = _resamplings(_Method(mode, align_corners, num_dims), shape[2:], sizes, factors)
    return tuple(window or Window(1) for window in found)


@define("windowed", F.interpolate, windows=_windows)
def interpolate(
    x: Slab,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Slab:
    """``x`` at another size, of the inputs that torch reads and with the weights it gives."""
    num_dims = x.ndim - 2
    options = (mode, align_corners, recompute_scale_factor, antialias)
    sizes = _output_sizes(x.layout.shape, _hashable(size), _hashable(scale_factor), options)
    if mode == "area":
        pool = getattr(F, f"adaptive_avg_pool{num_dims}d")
        return dispatch(pool, (x, sizes), {})  # type: ignore[no-any-return]
    method, split = _Method(mode, align_corners, num_dims), any(x.layout.splits[2:])
    if split and antialias:
        raise unsupported(F.interpolate, x, "antialias=True is not supported")
    if split and not x.is_floating_point() and method.smooth:
        raise unsupported(F.interpolate, x, f"values of {x.dtype} are rounded")
    if not split and x.device.type == "cuda":
        _check_channel(x, sizes)
    recomputed = scale_factor is None or recompute_scale_factor
    factors = None if recomputed else _per_dim(scale_factor, num_dims)
    windows = _resamplings(method, x.layout.shape[2:], sizes, factors)
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    window = fetch(x.local, planned.exchange, x.mesh)
    dtype = result_dtype(lambda t: F.interpolate(t, 2, mode=mode), x)
    if not planned.box:
        local = no_outputs(planned.box.shape, window, dtype)
    elif split:
        local = _run_split(x, window, method, windows, factors, planned).to(dtype)
    else:
        local = local_interpolate(window, size, scale_factor, *options)
    # Resized to its own size, it is still a tensor of its own.
    return x.with_local(local.clone() if local is x.local else local, planned.output)


def _check_channel(x: Slab, sizes: Sequence[int]) -> None:
    """Raises where a GPU would interpolate wrongly, as pytorch issue 193689 says."""
    numel = max(math.prod(x.layout.shape[2:]), math.prod(sizes))
    if numel > tiles.MAX_NUMEL:
        raise LayoutError(
            f"interpolate: a channel has {numel} elements before or after, and a GPU counts no "
            f"more than {tiles.MAX_NUMEL}: split it along depth, height or width"
        )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) else value


def _per_dim(factor: float | Sequence[float] | None, num_dims: int) -> tuple[float, ...]:
    factors = factor if isinstance(factor, Sequence) else [factor] * num_dims
    return tuple(float(one) for one in factors if one is not None)


@lru_cache(maxsize=1024)
def _output_sizes(
    shape: tuple[int, ...], size: Any, scale_factor: Any, options: tuple[Any, ...]
) -> tuple[int, ...]:
    """What torch makes of these arguments; it raises, on all ranks alike, where it refuses them."""
    out = F.interpolate(torch.empty(shape, device="meta"), size, scale_factor, *options)
    return tuple(out.shape[2:])


class _Method(NamedTuple):
    """How values are interpolated, whatever the sizes."""

    mode: str
    align_corners: bool | None
    num_dims: int

    @property
    def smooth(self) -> bool:
        """Whether another way to round makes no more than a rounding error."""
        return not self.mode.startswith("nearest")

    def run(self, x: Tensor, sizes: Sequence[int], factors: Sequence[float] | None) -> Tensor:
        size = sizes if factors is None else None
        return local_interpolate(x, size, factors, self.mode, self.align_corners)


@lru_cache(maxsize=1024)
def _resamplings(
    method: _Method,
    extents: tuple[int, ...],
    sizes: tuple[int, ...],
    factors: tuple[float, ...] | None,
) -> tuple[Resampling | None, ...]:
    """What outputs read along each spatial dim; None where they are the inputs."""
    return tuple(
        None if n == m and factor in (None, 1.0) else _resampling(method, n, m, factor)
        for n, m, factor in zip(extents, sizes, factors or [None] * method.num_dims, strict=True)
    )


def _resampling(method: _Method, extent: int, num: int, factor: float | None) -> Resampling:
    neighbours = _NEIGHBOURS.get(method.mode, (0, 0))
    if method.align_corners:
        step = (extent - 1) / (num - 1) if num > 1 else 0.0
        return Resampling(extent, num, step, 0.0, *neighbours, shifts=False)
    step = 1 / factor if factor else extent / num
    centre = {"nearest": 0.0, "nearest-exact": step / 2}.get(method.mode, step / 2 - 0.5)
    power_of_two = math.frexp(step)[0] == 0.5
    return Resampling(extent, num, step, centre, *neighbours, shifts=power_of_two)


def _run_split(
    x: Slab,
    window: Tensor,
    method: _Method,
    windows: Sequence[Resampling | None],
    factors: Sequence[float] | None,
    planned: Windowed,
) -> Tensor:
    """Dims that torch would round in another way are done one by one; then it does the others."""
    sizes, factors = list(planned.box.shape[2:]), list(factors or ())
    probes, left, crops = _probes(x, method, planned.output), False, []
    for dim, resampling in enumerate(windows):
        if resampling is None:
            continue
        own, reads = planned.box.spans[dim + 2], planned.exchange.wanted.spans[dim + 2]
        split = x.layout.splits[dim + 2]
        if split and resampling.shifts:
            sizes[dim] = int(reads.size / resampling.step)
            crops.append((dim + 2, own.start - int(reads.start / resampling.step), own.size))
        if resampling.shifts or (
            method.smooth and not split and resampling.extent != resampling.num
        ):
            left = True
            continue
        probe = probes[dim]._replace(factor=factors[dim] if factors else None)
        window = _run_taps(window, probe, resampling, own, reads)
        factors[dim : dim + 1] = [1.0] if factors else []
    out = method.run(window, sizes, factors or None) if left else window
    for crop in crops:
        out = out.narrow(*crop)
    return out


class _Probe(NamedTuple):
    """One dim of an interpolation, with what torch looks at when it chooses how to round."""

    method: _Method
    dim: int
    factor: float | None
    other_size: int
    """Of the output along the other dims, together."""
    num_channels: int
    memory_format: torch.memory_format

    def run(self, x: Tensor, size: int) -> Tensor:
        """``x``, of two dims, interpolated along the second."""
        num_dims, dim = self.method.num_dims, self.dim
        shape, sizes = [1] * num_dims, [1] * num_dims
        sizes[0 if dim else -1] = self.other_size
        factors = list(map(float, sizes))
        shape[dim], sizes[dim], factors[dim] = x.shape[1], size, self.factor or 1.0
        images = x.view(x.shape[0], 1, *shape).expand(-1, self.num_channels, *shape)
        images = images.contiguous(memory_format=self.memory_format)
        out = self.method.run(images, sizes, factors if self.factor else None)
        return out.movedim(dim + 2, 1).flatten(2)[:, :, 0]


def _probes(x: Slab, method: _Method, output: Layout) -> list[_Probe]:
    """A probe for each dim, without its factor."""
    sizes, memory_format = output.shape[2:], memory_format_of(x.local)
    contiguous = memory_format is torch.contiguous_format
    num_channels = 1 if contiguous else min(4, x.shape[1])
    # If all sizes stay what they are torch may copy; beyond hundreds they make no difference.
    alike, most = output.shape == x.layout.shape, 2 if method.smooth else 300
    others = [1 if alike else min(max(2, sum(sizes) - size), most) for size in sizes]
    return [
        _Probe(method, dim, None, other, num_channels, memory_format)
        for dim, other in enumerate(others)
    ]


def _run_taps(x: Tensor, probe: _Probe, resampling: Resampling, own: Span, reads: Span) -> Tensor:
    """``x``, which holds what the outputs ``own`` read along a dim, interpolated along it."""
    wide = x if x.dtype == torch.float64 else x.float()
    taps = _taps(probe, resampling, own, reads, wide.dtype, wide.device)
    return _Weighted.apply(wide, probe.dim + 2, *taps)  # type: ignore[no-any-return, no-untyped-call]


class _Taps(NamedTuple):
    """The inputs that each output reads along one dim, and their weights, an output a row."""

    rows: Tensor
    weights: Tensor


class _Weighted(Function):
    """Rows added with weights. The weights of gradients are given too, as torch's may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, taps: _Taps, grad_taps: _Taps) -> Tensor:
        ctx.dim, ctx.extent, ctx.taps = dim, x.shape[dim], grad_taps
        parts = [
            x.index_select(dim, rows) * along(weights, dim, x.ndim)
            for rows, weights in zip(taps.rows.T, taps.weights.T, strict=True)
        ]
        return sum(parts[1:], start=parts[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dim, taps = ctx.dim, ctx.taps
        out = grad.new_zeros((*grad.shape[:dim], ctx.extent, *grad.shape[dim + 1 :]))
        for rows, weights in zip(taps.rows.T, taps.weights.T, strict=True):
            out.index_add_(dim, rows, grad * along(weights, dim, grad.ndim))
        return out, None, None, None


@cached_constants
def _taps(
    probe: _Probe,
    resampling: Resampling,
    outputs: Span,
    reads: Span,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[_Taps, _Taps]:
    """What ``outputs`` read of the inputs ``reads``, and what their gradients add to.

    torch's own rounding decides which inputs are read and with what weights, and in its gradients
    it may decide otherwise. So both are not computed but seen: by interpolating combs, whose teeth
    are so far apart that no output reads two of them.
    """
    extent, num, reach = resampling.extent, resampling.num, resampling.reach
    places = torch.arange(*outputs, device=device)[:, None]
    first = torch.tensor([resampling.first(o) for o in range(*outputs)], device=device)
    rows = first[:, None] + torch.arange(reach, device=device)
    inside = (rows >= reads.start) & (rows < reads.stop)
    # Outputs this far apart read no input in common.
    apart = min(num, math.ceil((reach + 1) / resampling.step) if resampling.step else num)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        seen = probe.run(_combs(extent, reach, dtype, device), num)
        zeros = torch.zeros((apart, extent), dtype=dtype, device=device, requires_grad=True)
        made = probe.run(zeros, num)
        (grads,) = torch.autograd.grad(made, zeros, _combs(num, apart, dtype, device))
    weights = seen[rows % reach, places].where(inside, 0)
    grad_weights = grads[places % apart, rows.clamp(0, extent - 1)].where(inside, 0)
    local = (rows - reads.start).clamp(0, reads.size - 1)
    return _trimmed(local, weights), _trimmed(local, grad_weights)


def _combs(extent: int, period: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``period`` rows of length ``extent``; row ``i`` is 1 at ``i``, ``i + period`` and so on."""
    places = torch.arange(extent, device=device) % period
    return (places == torch.arange(period, device=device)[:, None]).to(dtype)


def _trimmed(rows: Tensor, weights: Tensor) -> _Taps:
    """The taps without those that have no weight, as far as outputs then have equally many."""
    weighty = weights != 0
    first = weighty.int().argmax(1, keepdim=True)
    last = weights.shape[1] - 1 - weighty.flip(1).int().argmax(1, keepdim=True)
    columns = first + torch.arange(int((last - first).max()) + 1, device=rows.device)
    there = columns < weights.shape[1]
    columns = columns.clamp(max=weights.shape[1] - 1)
    return _Taps(rows.gather(1, columns), weights.gather(1, columns) * there)
