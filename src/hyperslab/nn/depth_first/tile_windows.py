"""Convolutions and pools of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import (
    AnyWindow,
    Box,
    Layout,
    PieceCall,
    Span,
    Split,
    TransposedWindow,
    Window,
    output_cuts,
    plan_piece_call,
    plan_transposed_call,
)
from hyperslab.nn.depth_first.tile_slab import TileSlab, alone, not_by_tiles, tile_rule
from hyperslab.nn.ops.windows.conv import conv_windows
from hyperslab.nn.ops.windows.pool import _make_windows
from hyperslab.nn.ops.windows.spatial import check_steps, per_dim
from hyperslab.nn.slab import Slab

Numbers = int | Sequence[int]
Pads = list[int]
Ends = tuple[int, int]
"""Before the start of a dim and after its end."""


def _checked(function: Callable[..., Any], x: Any, num_dims: int) -> TileSlab:
    if not isinstance(x, TileSlab):
        raise not_by_tiles(function, "it is given a tile that is not its input")
    if x.ndim != num_dims + 2:
        raise not_by_tiles(function, f"it has {x.ndim} dims, and a batch has {num_dims + 2}")
    return x


def _through(
    function: Callable[..., Any],
    x: TileSlab,
    windows: Sequence[AnyWindow],
    calls: Sequence[PieceCall],
    run: Callable[[Any], Any],
) -> TileSlab:
    """The tile that ``run`` makes of what the ``calls`` read, less the outputs that they drop."""
    samples, channels = x.held.spans[:2]
    reads = Box((samples, channels, *(call.reads for call in calls)))
    whole = _output_layout(function, x.whole, windows)
    out: Slab = run(x.part(reads))
    held = Box((samples, Span(0, out.shape[1]), *(call.outputs for call in calls)))
    drops = [slice(call.drop, call.drop + call.outputs.size) for call in calls]
    if out.shape != held.shape:
        # Without gaps, which the fused kernels and writing in place would stumble over.
        kept = out.local[(slice(None), slice(None), *drops)]
        out = alone(kept.contiguous(memory_format=memory_format_of(out.local)))
    whole = whole.with_dim(1, out.shape[1])
    return x.made_into(out, held, whole, windows=(None, None, *windows))


def _output_layout(
    function: Callable[..., Any], source: Layout, windows: Sequence[AnyWindow]
) -> Layout:
    """What the output's layout would be layer by layer, but for its channels."""
    output = source
    for dim, window in enumerate(windows, start=2):
        split = source.splits[dim]
        cuts = split and Split(split.axis, output_cuts(window, split.cuts))
        output = output.with_dim(dim, window.output_extent(source.shape[dim]), cuts)
    if min(output.shape[2:]) < 1:
        raise LayoutError(
            f"{function.__name__}: the kernel does not fit the padded input of shape "
            f"{source.shape}; the output would have shape {output.shape}"
        )
    return output


def _plan_calls(x: TileSlab, windows: Sequence[Window]) -> list[PieceCall]:
    """The calls for what is wanted of the next tensor."""
    extents = x.whole.shape[2:]
    makes = [w.output_extent(n) for w, n in zip(windows, extents, strict=True)]
    wanted = x.tape.wanted_next((*x.whole.shape[:2], *makes)).spans[2:]
    return list(map(plan_piece_call, windows, wanted, extents))


def _make_conv(num_dims: int) -> None:
    function = getattr(F, f"conv{num_dims}d")

    @tile_rule(function)
    def conv(
        input: TileSlab,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: str | Numbers = 0,
        dilation: Numbers = 1,
        groups: int = 1,
    ) -> TileSlab:
        x = _checked(function, input, num_dims)
        steps, dilations = per_dim(stride, num_dims), per_dim(dilation, num_dims)
        pads = padding if isinstance(padding, str) else per_dim(padding, num_dims)
        windows = conv_windows(tuple(weight.shape[2:]), steps, pads, dilations)
        planned = map(_exact_call, windows, _plan_calls(x, windows), x.whole.shape[2:])
        calls, ends = zip(*planned, strict=True)
        around = [before if before == after else 0 for before, after in ends]
        uneven = [(0, 0) if before == after else (before, after) for before, after in ends]
        zeros = [n for pair in reversed(uneven) for n in pair]

        def run(piece: Any) -> Any:
            piece = F.pad(piece, zeros) if any(zeros) else piece
            return function(piece, weight, bias, steps, around, dilations, groups)

        return _through(function, x, windows, calls, run)


def _exact_call(window: Window, call: PieceCall, extent: int) -> tuple[PieceCall, Ends]:
    """The call that reads what its outputs do, and how many zeros they read before and after.

    Tensors are largest after the first convolutions: outputs that are made to be dropped would
    cost more than a copy of the inputs with their zeros.
    """
    if not call.at_end:
        return call, (0, 0)
    reads = window.reads(call.outputs)
    inside = Span(max(0, reads.start), min(reads.stop, extent))
    if inside.start >= inside.stop:  # outputs of nothing but padding
        around = window.padding + window.extra
        return call._replace(drop=call.drop + window.extra), (around, around)
    before, after = inside.start - reads.start, reads.stop - inside.stop
    makes = (inside.size + 2 * before - window.reach - 1) // window.stride + 1
    if makes == call.outputs.size:  # nothing reads what else is padded after the end
        after = before
    return PieceCall(inside, call.outputs, 0, at_end=True), (before, after)


def _make_conv_transpose(num_dims: int) -> None:
    function = getattr(F, f"conv_transpose{num_dims}d")

    @tile_rule(function)
    def conv_transpose(
        input: TileSlab,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: Numbers = 0,
        output_padding: Numbers = 0,
        groups: int = 1,
        dilation: Numbers = 1,
    ) -> TileSlab:
        x = _checked(function, input, num_dims)
        numbers = [per_dim(v, num_dims) for v in (stride, padding, dilation, output_padding)]
        steps, pads, dilations, more = numbers
        check_steps(steps, (*pads, *more), dilations)
        windows = tuple(map(TransposedWindow, weight.shape[2:], *numbers))
        extents = x.whole.shape[2:]
        calls = list(map(plan_transposed_call, windows, x.held.spans[2:], extents))
        after = [n if call.at_end else 0 for n, call in zip(more, calls, strict=True)]

        def run(piece: Any) -> Any:
            return function(piece, weight, bias, steps, 0, after, groups, dilations)

        return _through(function, x, windows, calls, run)


def _run_pool(
    function: Callable[..., Any],
    x: TileSlab,
    numbers: tuple[Numbers, Numbers | None, Numbers, Numbers],
    ceil: bool,
    run: Callable[[Any, Pads], Any],
) -> TileSlab:
    """A pool of a kernel, stride, padding and dilation, the ``numbers``."""
    kernel, stride, padding, dilation = numbers
    num_dims = x.ndim - 2
    steps = kernel if stride is None or stride == () or stride == [] else stride
    given = [per_dim(v, num_dims) for v in (kernel, steps, padding, dilation)]
    windows = _make_windows(*given, x.whole.shape[2:] if ceil else None)
    calls = _plan_calls(x, windows)
    pads = [w.padding if c.at_end else 0 for w, c in zip(windows, calls, strict=True)]
    return _through(function, x, windows, calls, lambda piece: run(piece, pads))


def _make_max_pool(num_dims: int) -> None:
    function = getattr(F, f"max_pool{num_dims}d")

    @tile_rule(function, getattr(torch, f"max_pool{num_dims}d"))
    def max_pool(
        input: TileSlab,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        dilation: Numbers = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> TileSlab:
        x = _checked(function, input, num_dims)
        if return_indices:
            raise not_by_tiles(function, "it gives indices")

        def run(piece: Any, pads: Pads) -> Any:
            return function(piece, kernel_size, stride, pads, dilation, ceil_mode)

        return _run_pool(function, x, (kernel_size, stride, padding, dilation), ceil_mode, run)


def _make_avg_pool(num_dims: int) -> None:
    function = getattr(F, f"avg_pool{num_dims}d")

    @tile_rule(function)
    def avg_pool(
        input: TileSlab,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TileSlab:
        x = _checked(function, input, num_dims)
        override = {} if divisor_override is None else {"divisor_override": divisor_override}

        def run(piece: Any, pads: Pads) -> Any:
            args = kernel_size, stride, pads, ceil_mode, count_include_pad
            return function(piece, *args, **override)

        return _run_pool(function, x, (kernel_size, stride, padding, 1), ceil_mode, run)


def _make_lp_pool(num_dims: int) -> None:
    function = getattr(F, f"lp_pool{num_dims}d")

    @tile_rule(function)
    def lp_pool(
        input: TileSlab,
        norm_type: float,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        ceil_mode: bool = False,
    ) -> TileSlab:
        x = _checked(function, input, num_dims)

        def run(piece: Any, _: Pads) -> Any:
            return function(piece, norm_type, kernel_size, stride, ceil_mode)

        return _run_pool(function, x, (kernel_size, stride, 0, 1), ceil_mode, run)


for _num_dims in (1, 2, 3):
    _make_conv(_num_dims)
    _make_conv_transpose(_num_dims)
    _make_max_pool(_num_dims)
    _make_avg_pool(_num_dims)
    _make_lp_pool(_num_dims)


@tile_rule(F.pad)
def _pad(
    input: TileSlab, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> TileSlab:
    """Padding of spatial dims by what is known at their ends, kept as outputs of their own."""
    x = input
    ends = [(0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        ends[-1 - i] = pad[2 * i], pad[2 * i + 1]
    if mode not in ("constant", "replicate") or any(map(any, ends[:2])) or min(pad) < 0:
        raise not_by_tiles(F.pad, f"pad={tuple(pad)} with mode={mode!r} has no rule there")
    windows = [Window(1, padding=before, extra=after - before) for before, after in ends[2:]]
    spans, extents = x.held.spans[2:], x.whole.shape[2:]
    added = [
        (0 if held.start else before, after if held.stop == extent else 0)
        for (before, after), held, extent in zip(ends[2:], spans, extents, strict=True)
    ]
    calls = [
        PieceCall(
            held, Span(held.start + w.padding - now[0], held.stop + w.padding + now[1]), 0, True
        )
        for w, held, now in zip(windows, spans, added, strict=True)
    ]
    flat = [n for pair in reversed(added) for n in pair]
    return _through(F.pad, x, windows, calls, lambda piece: F.pad(piece, flat, mode, value))
