"""Pooled values put back where they were found, in 1 to 3 dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.reduce import reduce_sum_
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.errors import LayoutError
from hyperslab.layout import (
    Box,
    Numbers,
    TransposedWindow,
    check_steps,
    integers,
    plan_windows,
    pool_numbers,
)
from hyperslab.nn.align import localize
from hyperslab.nn.op import Call, Function, Op, unsupported
from hyperslab.nn.ops.windows.spatial import (
    along,
    check_batch,
    check_extents,
    define_windowed,
    one_sample,
)
from hyperslab.nn.slab import Slab


def _make_max_unpool(num_dims: int) -> None:
    def read(
        op: Op,
        input: Slab | Tensor,
        indices: Slab | Tensor,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        output_size: Sequence[int] | None = None,
    ) -> Call:
        kernel, steps, pads, _ = pool_numbers(num_dims, kernel_size, stride, padding)
        options = {"kernel_size": kernel, "stride": steps, "padding": pads}
        windows = _windows(op.function, input, (kernel, steps, pads), output_size)
        return Call(op, (input, indices), {**options, "output_size": output_size}, windows)

    function = getattr(F, f"max_unpool{num_dims}d")
    define_windowed(num_dims, function, reader=read, run=_max_unpool)


def _max_unpool(call: Call) -> Slab:
    """Zeros, and the input at indices that count the output's pixels.

    Along split dims an index must lie in the window whose largest value it is that of.
    """
    function, windows = call.op.function, cast(tuple[TransposedWindow, ...], call.windows)
    x = check_batch(function, call.input, len(windows))
    places = _as_batch(call.operands[1], x.ndim)
    if tuple(places.shape) != tuple(x.shape):
        raise LayoutError(
            f"{function.__name__}: indices of shape {tuple(places.shape)} for values of shape "
            f"{tuple(x.shape)}"
        )
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    check_extents(function, x, planned.output)
    index, sizes = localize(places, x.layout, x.box), planned.output.shape[2:]
    split = any(x.layout.splits[2:])
    if split:
        _check_indices(function, x, index, windows, sizes)
    window = fetch(x.local, planned.exchange, x.mesh)
    index = fetch(index, planned.exchange, x.mesh, fill=-1)
    if not planned.box:
        local = empty_output(planned.box.shape, window)
    elif split:
        local = _scattered(window, index, planned.box, sizes)
    else:
        local = _unpool(window, index, sizes)
    return x.with_local(local, planned.output)


def _as_batch(indices: Slab | Tensor, ndim: int) -> Slab | Tensor:
    """``indices``, with a sample dim if the values were given one."""
    if len(indices.shape) == ndim:
        return indices
    return one_sample(indices) if isinstance(indices, Slab) else indices.unsqueeze(0)


def _windows(
    function: Function,
    x: Slab | Tensor,
    numbers: Sequence[tuple[int, ...]],
    output_size: Sequence[int] | None,
) -> tuple[TransposedWindow, ...]:
    """Those of an unpool of a kernel, stride and padding, the ``numbers``."""
    kernels, strides, pads = numbers
    num_dims = len(kernels)
    check_steps((*kernels, *strides), pads)
    windows = tuple(map(TransposedWindow, kernels, strides, pads))
    if output_size is None:
        return windows
    sizes = integers(output_size)
    sizes = sizes[2:] if len(sizes) == num_dims + 2 else sizes
    extra = [
        size - window.output_extent(n)
        for size, window, n in zip(sizes, windows, x.shape[-num_dims:], strict=False)
    ]
    if len(sizes) != num_dims or any(abs(e) >= s for e, s in zip(extra, strides, strict=True)):
        raise LayoutError(
            f"{function.__name__}: an output size of {tuple(output_size)} does not fit an input of "
            f"shape {tuple(x.shape)} with a kernel of {kernels} and a stride of {strides}"
        )
    return tuple(map(TransposedWindow, kernels, strides, pads, (1,) * num_dims, extra))


def _check_indices(
    function: Function,
    x: Slab,
    indices: Tensor,
    windows: Sequence[TransposedWindow],
    sizes: Sequence[int],
) -> None:
    """Raises on all ranks if any index lies outside its window along a split dim.

    Collective over all ranks: what the indices are, only their owners know.
    """
    good = (indices >= 0) & (indices < math.prod(sizes))
    for dim, (window, place) in enumerate(
        zip(windows, _places(indices, sizes), strict=True), start=2
    ):
        if x.layout.splits[dim]:
            span = x.box.spans[dim]
            first = torch.arange(*span, device=x.device) * window.stride - window.padding
            first = along(first, dim, x.ndim)
            good &= (place >= first) & (place < first + window.kernel)
    if int(reduce_sum_((~good).sum(), x.mesh, x.mesh.grid.long_axes)):
        raise unsupported(function, x, "some indices lie outside their windows")


def _places(indices: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Where ``indices`` into a tensor of ``sizes`` lie along each of its dims."""
    places = []
    for dim in range(len(sizes)):
        inner = math.prod(sizes[dim + 1 :])
        places.append(indices // inner)
        indices = indices % inner
    return places


def _scattered(values: Tensor, indices: Tensor, own: Box, sizes: Sequence[int]) -> Tensor:
    """This rank's pixels: zeros, and those of ``values`` whose indices are among them."""
    inside, flat = indices >= 0, torch.zeros_like(indices)
    for place, span in zip(_places(indices, sizes), own.spans[2:], strict=True):
        inside &= (place >= span.start) & (place < span.stop)
        flat = flat * span.size + (place - span.start)
    rows, *others = own.shape[2:]
    # Values that are other ranks' go to a row after the last, which is left out.
    flat = torch.where(inside, flat, rows * math.prod(others))
    return _unpool(values, flat, [rows + 1, *others]).narrow(2, 0, rows)


def _unpool(values: Tensor, indices: Tensor, sizes: Sequence[int]) -> Tensor:
    if len(sizes) == 3:
        return torch.ops.aten.max_unpool3d(values, indices, sizes, (1, 1, 1), (0, 0, 0))  # type: ignore[no-any-return]
    if len(sizes) == 2:
        return torch.ops.aten.max_unpool2d(values, indices, sizes)  # type: ignore[no-any-return]
    return _unpool(values.unsqueeze(-1), indices.unsqueeze(-1), [*sizes, 1]).squeeze(-1)


for _num_dims in (1, 2, 3):
    _make_max_unpool(_num_dims)
