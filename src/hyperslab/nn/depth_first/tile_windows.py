"""Convolutions and pools of tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

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
from hyperslab.nn.depth_first.tile_slab import TileSlab, not_by_tiles, single_rank_slab, tile_rule
from hyperslab.nn.op import OPS, Call, Function
from hyperslab.nn.slab import Slab

Ends = tuple[int, int]
"""Before the start of a dim and after its end."""


TileRule = Callable[[Call, TileSlab], TileSlab]


def _windowed(*functions: Function) -> Callable[[TileRule], TileRule]:
    """Makes the decorated rule what computes Calls of ``functions`` on tiles."""

    def keep(rule: TileRule) -> TileRule:
        for function in functions:
            tile_rule(function)(partial(_run, function, rule))
        return rule

    return keep


def _run(function: Function, rule: TileRule, *args: Any, **kwargs: Any) -> TileSlab:
    call = OPS[function].parse(args, kwargs)
    x, num_dims = call.input, len(call.windows)
    if not isinstance(x, TileSlab):
        raise not_by_tiles(function, "it is given a tile that is not its input")
    if x.ndim != num_dims + 2:
        raise not_by_tiles(function, f"it has {x.ndim} dims, and a batch has {num_dims + 2}")
    return rule(call, x)


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
        out = single_rank_slab(kept.contiguous(memory_format=memory_format_of(out.local)))
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


@_windowed(F.conv1d, F.conv2d, F.conv3d)
def _conv(call: Call, x: TileSlab) -> TileSlab:
    windows = cast(tuple[Window, ...], call.windows)
    planned = map(_exact_call, windows, _plan_calls(x, windows), x.whole.shape[2:])
    calls, ends = zip(*planned, strict=True)
    around = [before if before == after else 0 for before, after in ends]
    uneven = [(0, 0) if before == after else (before, after) for before, after in ends]
    zeros = [n for pair in reversed(uneven) for n in pair]

    def run(piece: Any) -> Any:
        piece = F.pad(piece, zeros) if any(zeros) else piece
        return call.on(piece, *call.operands[1:], padding=around).run()

    return _through(call.op.function, x, windows, calls, run)


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


@_windowed(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(call: Call, x: TileSlab) -> TileSlab:
    windows = cast(tuple[TransposedWindow, ...], call.windows)
    calls = list(map(plan_transposed_call, windows, x.held.spans[2:], x.whole.shape[2:]))
    more = [w.output_padding if c.at_end else 0 for w, c in zip(windows, calls, strict=True)]

    def run(piece: Any) -> Any:
        return call.on(piece, *call.operands[1:], padding=0, output_padding=more).run()

    return _through(call.op.function, x, windows, calls, run)


_DIMS = (1, 2, 3)
_POOLS = [getattr(F, f"{name}_pool{n}d") for name in ("max", "avg", "lp") for n in _DIMS]


@_windowed(*_POOLS, *(getattr(torch, f"max_pool{n}d") for n in _DIMS))
def _pool(call: Call, x: TileSlab) -> TileSlab:
    if call.options.get("return_indices"):
        raise not_by_tiles(call.op.function, "it gives indices")
    windows = cast(tuple[Window, ...], call.windows)
    calls = _plan_calls(x, windows)
    pads = [w.padding if c.at_end else 0 for w, c in zip(windows, calls, strict=True)]

    def run(piece: Any) -> Any:
        if "padding" not in call.options:  # power averages have none
            return call.on(piece).run()
        return call.on(piece, padding=pads).run()

    return _through(call.op.function, x, windows, calls, run)


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
