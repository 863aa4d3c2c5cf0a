"""Max, average and power-average pools in 1 to 3 dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.graph import cached_constants
from hyperslab.errors import LayoutError
from hyperslab.kernels.pool import (
    avg_pool as local_avg_pool,
    global_indices,
    max_pool as local_max_pool,
)
from hyperslab.layout import (
    Box,
    Layout,
    Numbers,
    Span,
    UnpaddedStart,
    Window,
    Windowed,
    plan_windows,
    pool_numbers,
    pool_windows,
)
from hyperslab.nn.op import Call, Op, unsupported
from hyperslab.nn.ops.windows.spatial import (
    by_implementation,
    check_batch,
    check_extents,
    define_windowed,
    no_outputs,
    result_dtype,
)
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import builtin_nn


def _windows(
    x: Slab | Tensor, numbers: Sequence[tuple[int, ...]], ceil_mode: bool
) -> tuple[Window, ...]:
    """Those of a pool of a kernel, stride, padding and dilation, the ``numbers``."""
    return pool_windows(*numbers, tuple(x.shape[-len(numbers[0]) :]) if ceil_mode else None)


@lru_cache(maxsize=1024)
def unpadded(windows: tuple[Window, ...]) -> tuple[UnpaddedStart, ...]:
    """The windows of a max pool.

    It takes the first of a window's numbers if all are lowest, so padding must not come first.
    """
    return tuple(UnpaddedStart(w.kernel, w.stride, w.padding, w.dilation, w.extra) for w in windows)


def _fetch_window(
    function: Callable[..., Any], x: Slab, windows: tuple[Window, ...], fill: float
) -> tuple[Tensor, Windowed]:
    """The inputs of this rank's outputs, and the plan."""
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, (None, None, *windows))
    check_extents(function, x, planned.output)
    return fetch(x.local, planned.exchange, x.mesh, fill=fill), planned


def _no_outputs(call: Call, x: Slab, window: Tensor, planned: Windowed) -> Tensor:
    def run(t: Tensor) -> Tensor:
        out = call.op.function(t, 1)
        return out if isinstance(out, Tensor) else out[0]

    return no_outputs(planned.box.shape, window, result_dtype(run, x))


def _make_max_pool(num_dims: int) -> None:
    function, plain = (getattr(space, f"max_pool{num_dims}d") for space in (F, torch))
    name = f"max_pool{num_dims}d_with_indices"
    both = {getattr(space, name, function) for space in (F, torch, builtin_nn)} - {function}

    def read(
        op: Op,
        input: Slab | Tensor,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        dilation: Numbers = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Call:
        numbers = pool_numbers(num_dims, kernel_size, stride, padding, dilation)
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        options = dict(zip(names, (*numbers, ceil_mode), strict=True))
        if op.function is function:  # others always give indices, or never
            options["return_indices"] = return_indices
        return Call(op, (input,), options, _windows(input, numbers, ceil_mode))

    define_windowed(num_dims, function, plain, reader=read, run=max_pool)
    define_windowed(num_dims, *both, reader=read, run=partial(max_pool, return_indices=True))


def max_pool(call: Call, *, return_indices: bool = False) -> Slab | tuple[Slab, Slab]:
    """The maxima that a Call of a batch asks for, and perhaps their indices."""
    return_indices = call.options.get("return_indices", return_indices)
    x = check_batch(call.op.function, call.input, len(call.windows))
    windows = unpadded(call.windows)
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    window, planned = _fetch_window(call.op.function, x, windows, lowest)
    if planned.box:
        pads = pads_at_start(x.layout, windows, planned.box)
        found = None if return_indices else by_implementation(call, window, padding=pads)
        if found is None:
            numbers = {**call.options, "padding": pads, "return_indices": return_indices}
            found = local_max_pool(window, **numbers)
        out, indices = found if return_indices else (found, found)
    else:
        out = _no_outputs(call, x, window, planned)
        indices = torch.empty_like(out, dtype=torch.int64)
    values = x.with_local(as_many(out, planned.box.shape), planned.output)
    if not return_indices:
        return values
    starts = [span.start for span in planned.exchange.wanted.spans[2:]]
    flat = global_indices(indices, window.shape[2:], starts, x.layout.shape[2:])
    return values, x.with_local(as_many(flat, planned.box.shape), planned.output)


def pads_at_start(source: Layout, windows: Sequence[UnpaddedStart], outputs: Box) -> list[int]:
    """What the local pool pads: before the tensor's start, and the whole of dims that are whole."""
    dims = zip(windows, outputs.spans[2:], source.splits[2:], strict=True)
    return [w.padding_before(span) if split else w.padding for w, span, split in dims]


def as_many(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of ``x``: padding at both ends makes outputs that are not wanted."""
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def _make_avg_pool(num_dims: int) -> None:
    def read(
        op: Op,
        input: Slab | Tensor,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Call:
        kernel, steps, pads, ones = pool_numbers(num_dims, kernel_size, stride, padding)
        options = {
            "kernel_size": kernel,
            "stride": steps,
            "padding": pads,
            "ceil_mode": ceil_mode,
            "count_include_pad": count_include_pad,
        }
        if divisor_override is not None:  # the pool of 1 dim knows of none
            options["divisor_override"] = divisor_override
        return Call(op, (input,), options, _windows(input, (kernel, steps, pads, ones), ceil_mode))

    define_windowed(num_dims, getattr(F, f"avg_pool{num_dims}d"), reader=read, run=avg_pool)


def avg_pool(call: Call) -> Slab:
    """The averages that a Call of a batch asks for."""
    function, options = call.op.function, call.options
    x = check_batch(function, call.input, len(call.windows))
    divisor = options.get("divisor_override")
    if not x.is_floating_point():
        raise unsupported(function, x, "its numbers are not floating point")
    if divisor == 0:
        raise LayoutError("divisor_override must not be 0")
    windows, splits = cast(tuple[Window, ...], call.windows), x.layout.splits[2:]
    window, planned = _fetch_window(function, x, windows, 0.0)
    if not planned.box:
        return x.with_local(_no_outputs(call, x, window, planned), planned.output)
    if not any(splits):
        return x.with_local(_run_average(call, window, options), planned.output)
    pads = tuple(0 if split else w.padding for split, w in zip(splits, windows, strict=True))
    if divisor is not None or not any(w.padding or w.extra for w in windows):
        numbers = {**options, "padding": pads, "count_include_pad": True}
        return x.with_local(_run_average(call, window, numbers), planned.output)
    sums = _sum_pool(window, windows, pads, ceil=options["ceil_mode"])
    spans, extents = planned.box.spans[2:], x.layout.shape[2:]
    inside = not options["count_include_pad"]
    counts = _counts(windows, spans, extents, sums.dtype, sums.device, inside=inside)
    return x.with_local(sums / counts, planned.output)


def _run_average(call: Call, window: Tensor, options: Mapping[str, Any]) -> Tensor:
    made = by_implementation(call, window, **options) if call.op.implementations else None
    return local_avg_pool(window, **options) if made is None else made


def _sum_pool(x: Tensor, windows: Sequence[Window], pads: Sequence[int], *, ceil: bool) -> Tensor:
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    if len(windows) == 1:  # avg_pool1d has no divisor_override
        row = (1, *kernel), (1, *stride), (0, *pads)
        return local_avg_pool(x[:, :, None], *row, ceil, divisor_override=1)[:, :, 0]
    return local_avg_pool(x, kernel, stride, pads, ceil, divisor_override=1)


@cached_constants
def _counts(
    windows: tuple[Window, ...],
    outputs: tuple[Span, ...],
    extents: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    inside: bool,
) -> Tensor:
    """How many inputs each output averages: all as far as padding goes, or those ``inside``."""
    total = torch.ones(())
    for window, span, extent in zip(windows, outputs, extents, strict=True):
        start = torch.arange(span.start, span.stop) * window.stride - window.padding
        stop = (start + window.kernel).clamp(max=extent + window.padding)
        if inside:
            start, stop = start.clamp(min=0), stop.clamp(max=extent)
        total = total[..., None] * (stop - start)
    return total.to(device, dtype)


_KNOWS_MAX_NORM = float(F.lp_pool1d(torch.full((1, 1, 1), 3.0), math.inf, 1)) == 3
"""Whether this version of torch takes infinite powers for largest and smallest values."""


def _make_lp_pool(num_dims: int) -> None:
    max_pool, avg_pool = (getattr(F, f"{name}_pool{num_dims}d") for name in ("max", "avg"))

    def read(
        op: Op,
        input: Slab | Tensor,
        norm_type: float,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        ceil_mode: bool = False,
    ) -> Call:
        numbers = pool_numbers(num_dims, kernel_size, stride, 0)
        # The pool of 1 dim takes one number for its kernel, no list.
        options = {"norm_type": norm_type, "kernel_size": kernel_size, "stride": numbers[1]}
        windows = _windows(input, numbers, ceil_mode)
        return Call(op, (input,), {**options, "ceil_mode": ceil_mode}, windows)

    def lp_pool(call: Call) -> Slab:
        """The root of the sum of powers, made of the average of powers as torch makes it."""
        power, kernel, stride, ceil = call.options.values()
        x = call.input
        if power == math.inf and _KNOWS_MAX_NORM:
            return max_pool(x.abs(), kernel, stride, 0, 1, ceil)  # type: ignore[no-any-return]
        if power == -math.inf and _KNOWS_MAX_NORM:
            return -max_pool(-x.abs(), kernel, stride, 0, 1, ceil)  # type: ignore[no-any-return]
        means = avg_pool(x.pow(power), kernel, stride, 0, ceil)
        # This is the mean itself, but for its gradient, which is zero where the mean is.
        mean = means.local.sign() * F.relu(means.local.abs())
        windows = cast(tuple[Window, ...], call.windows)
        sums = mean * math.prod(window.kernel for window in windows)
        return means.with_local(sums.pow(1.0 / power))  # type: ignore[no-any-return]

    define_windowed(num_dims, getattr(F, f"lp_pool{num_dims}d"), reader=read, run=lp_pool)


for _num_dims in (1, 2, 3):
    _make_max_pool(_num_dims)
    _make_avg_pool(_num_dims)
    _make_lp_pool(_num_dims)
