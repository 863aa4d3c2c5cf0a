"""Max and average pools to a given output size, in 1 to 3 dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.graph import cached_constants
from hyperslab.kernels.pool import global_indices
from hyperslab.layout import (
    AdaptiveWindow,
    Cuts,
    Layout,
    Span,
    Split,
    Windowed,
    integers,
    plan_windows,
)
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.reduce.reductions import mean
from hyperslab.nn.ops.windows.spatial import (
    along,
    check_batch,
    no_outputs,
    result_dtype,
    without_samples,
)
from hyperslab.nn.placement import whole_along
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import builtin_nn

OutputSize = int | Sequence[int | None] | None


def _sizes(function: Callable[..., Any], x: Slab, output_size: OutputSize) -> tuple[int, ...]:
    """The output's size along each spatial dim; None is the input's."""
    extents = x.layout.shape[2:]
    sizes = _read_sizes(extents, output_size)
    if len(sizes) != len(extents):
        raise unsupported(function, x, f"its output size is {sizes}")
    if min(*sizes, *extents) < 1 or not x.is_floating_point():
        raise unsupported(function, x, f"it has no pool of {x.dtype} to {sizes}")
    return sizes


def _read_sizes(extents: Sequence[int], output_size: OutputSize) -> tuple[int, ...]:
    given = output_size if isinstance(output_size, Sequence) else [output_size]
    if len(given) == 1:
        given = [*given] * len(extents)
    pairs = zip_longest(given, extents[: len(given)])
    return tuple(n if size is None else integers(size)[0] for size, n in pairs)


def _windows(
    num_dims: int, x: Slab | Tensor, options: Mapping[str, Any]
) -> tuple[AdaptiveWindow, ...]:
    extents = tuple(x.shape[-num_dims:])
    return tuple(map(AdaptiveWindow, extents, _read_sizes(extents, options["output_size"])))


class _Apart(NamedTuple):
    """One dim's inputs, so repeated that windows are equally long and none overlap."""

    dim: int
    indices: Tensor
    """Of the inputs, in the fetched window. A short window repeats its last one."""
    beyond: Tensor
    """Which of the inputs are such repetitions."""
    excess: Tensor
    """How many times too long they make each window."""


@cached_constants
def _take_apart(
    dim: int, window: AdaptiveWindow, outputs: Span, start: int, device: torch.device
) -> _Apart:
    firsts = torch.tensor([window.first(o) for o in range(*outputs)])
    widths = torch.tensor([window.stop(o) for o in range(*outputs)]) - firsts
    length = int(widths.max())
    steps = torch.arange(length)
    indices = (firsts - start)[:, None] + torch.minimum(steps, widths[:, None] - 1)
    beyond = steps >= widths[:, None]
    parts = (indices.flatten(), beyond.flatten(), length / widths.double())
    return _Apart(dim, *(part.to(device) for part in parts))


class _Fetched(NamedTuple):
    """The inputs of this rank's outputs, fit for a local adaptive pool."""

    window: Tensor
    planned: Windowed
    apart: list[_Apart]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.planned.box.shape[2:]


def _fetch_windows(x: Slab, sizes: Sequence[int | None]) -> _Fetched:
    """What this rank's outputs read along all spatial dims but those whose size is None."""
    windows = [
        None if size is None else AdaptiveWindow(extent, size)
        for size, extent in zip(sizes, x.layout.shape[2:], strict=True)
    ]
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    local = fetch(x.local, planned.exchange, x.mesh)
    if not planned.box:
        return _Fetched(local, planned, [])
    apart = []
    for dim, window in enumerate(windows, start=2):
        if window and x.layout.splits[dim] and not window.apart:
            start = planned.exchange.wanted.spans[dim].start
            apart.append(_take_apart(dim, window, planned.box.spans[dim], start, x.device))
            local = local.index_select(dim, apart[-1].indices)
    return _Fetched(local, planned, apart)


def _make_adaptive_avg_pool(num_dims: int) -> None:
    function = getattr(F, f"adaptive_avg_pool{num_dims}d")
    name = f"adaptive_avg_pool{num_dims}d"

    functions = [getattr(space, name, function) for space in (F, torch, builtin_nn)]

    @define("windowed", *functions, windows=partial(_windows, num_dims))
    @without_samples(num_dims)
    def adaptive_avg_pool(x: Slab, output_size: OutputSize) -> Slab:
        """Where the output's size is 1 this is a mean over the ranks; elsewhere windows move."""
        x = check_batch(function, x, num_dims)
        sizes = _sizes(function, x, output_size)
        dtype = result_dtype(lambda t: function(t, 1), x)
        split = [dim for dim in x.layout.split_dims if dim > 1]
        if ones := [dim for dim in split if sizes[dim - 2] == 1]:
            x = cast(Slab, mean(x, ones, keepdim=True))
        fetched = _fetch_windows(x, sizes)
        planned, window = fetched.planned, fetched.window
        if not planned.box:
            return x.with_local(no_outputs(planned.box.shape, window, dtype), planned.output)
        if fetched.apart and dtype.itemsize < 4:
            window = window.float()
        for apart in fetched.apart:
            window = window.masked_fill(along(apart.beyond, apart.dim, x.ndim), 0)
        out = function(window, fetched.sizes)
        for apart in fetched.apart:
            out = out * along(apart.excess, apart.dim, x.ndim).to(out.dtype)
        return x.with_local(out.to(dtype), planned.output)


def _make_adaptive_max_pool(num_dims: int) -> None:
    name = f"adaptive_max_pool{num_dims}d"
    function, with_indices = getattr(F, name), getattr(F, f"{name}_with_indices")
    both = [getattr(space, name, with_indices) for space in (torch, builtin_nn)]

    windows = partial(_windows, num_dims)

    @define("windowed", function, windows=windows)
    @without_samples(num_dims)
    def adaptive_max_pool(
        x: Slab, output_size: OutputSize, return_indices: bool = False
    ) -> Slab | tuple[Slab, Slab]:
        """Where the output's size is 1 ranks compare their largest; elsewhere windows move."""
        x = check_batch(function, x, num_dims)
        sizes = _sizes(function, x, output_size)
        split = [dim for dim in x.layout.split_dims if dim > 1]
        ones = [dim for dim in split if sizes[dim - 2] == 1]
        out, indices = _local_max(function, x, sizes, ones)
        if ones:
            out, indices = _largest(out, indices, ones)
        return (out, indices) if return_indices else out

    @define("windowed", with_indices, *both, windows=windows)
    def adaptive_max_pool_with_indices(
        x: Slab, output_size: OutputSize, return_indices: bool = True
    ) -> Slab | tuple[Slab, Slab]:
        """``adaptive_max_pool`` and, whatever ``return_indices`` says, the indices."""
        return adaptive_max_pool(x, output_size, True)


def _local_max(
    function: Callable[..., Any], x: Slab, sizes: Sequence[int], ones: Sequence[int]
) -> tuple[Slab, Slab]:
    """The largest numbers and their global indices; along ``ones`` those of each rank's piece."""
    fetched = _fetch_windows(
        x, [None if dim in ones else n for dim, n in enumerate(sizes, start=2)]
    )
    layout, window = fetched.planned.output, fetched.window
    for dim in ones:
        layout = _one_each(layout, dim)
    box = layout.box(x.mesh.coords)
    if not box:
        dtype = result_dtype(lambda t: function(t, 1), x)
        empty = no_outputs(box.shape, window, dtype)
        return x.with_local(empty, layout), x.with_local(empty.detach().long(), layout)
    out, indices = function(window, box.shape[2:], True)
    sources: list[int | Tensor] = [span.start for span in fetched.planned.exchange.wanted.spans[2:]]
    for apart in fetched.apart:
        sources[apart.dim - 2] = apart.indices + sources[apart.dim - 2]
    indices = global_indices(indices, window.shape[2:], sources, x.layout.shape[2:])
    return x.with_local(out, layout), x.with_local(indices, layout)


def _one_each(layout: Layout, dim: int) -> Layout:
    """``layout`` with one index along ``dim`` for each rank that has any."""
    split = layout.splits[dim]
    assert split is not None
    bounds = [0]
    for span in split.cuts.spans:
        bounds.append(bounds[-1] + min(1, span.size))
    return layout.with_dim(dim, bounds[-1], Split(split.axis, Cuts(tuple(bounds))))


def _largest(values: Slab, indices: Slab, dims: Sequence[int]) -> tuple[Slab, Slab]:
    """The largest of ``values`` along ``dims``, and which of ``indices`` belongs to it.

    Of equal numbers the first in the global tensor counts, of NaNs the last, as for torch.
    """
    values, indices = whole_along(values, dims), whole_along(indices, dims)
    kept = [dim for dim in range(values.ndim) if dim not in dims]
    shape = tuple(1 if dim in dims else n for dim, n in enumerate(values.local.shape))
    flat, places = (
        slab.local.permute(*kept, *dims).flatten(len(kept)) for slab in (values, indices)
    )
    best = flat.amax(-1, keepdim=True)
    order = torch.where(flat == best, places, torch.iinfo(torch.int64).max)
    order = torch.where(flat.isnan(), -places - 1, order)
    winner = order.argmin(-1, keepdim=True)
    layout = values.layout
    for dim in dims:
        layout = layout.with_dim(dim, 1)
    return (
        values.with_local(flat.gather(-1, winner).view(shape), layout),
        values.with_local(places.gather(-1, winner).view(shape), layout),
    )


for _num_dims in (1, 2, 3):
    _make_adaptive_avg_pool(_num_dims)
    _make_adaptive_max_pool(_num_dims)
