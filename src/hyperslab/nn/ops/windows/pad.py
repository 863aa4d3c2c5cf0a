"""Padding, which moves data from one end to the other when it is circular."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.errors import LayoutError
from hyperslab.layout import (
    Box,
    Exchange,
    Grid,
    Layout,
    Span,
    Split,
    Window,
    integers,
    output_cuts,
    plan_exchange,
    plan_windows,
)
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.slab import Slab

Ends = dict[int, tuple[int, int]]  # how much is added before and after each dim that changes


def _windows(x: Slab | Tensor, options: Mapping[str, Any]) -> tuple[Window, ...]:
    ends = integers(options["pad"])
    return tuple(map(_window, reversed(ends[::2]), reversed(ends[1::2])))


def _window(below: int, above: int) -> Window:
    """One index, whose padding is kept."""
    return Window(1, padding=below, extra=above - below)


@define("windowed", F.pad, windows=_windows)
def pad(x: Slab, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Slab:
    """``x`` with ``pad`` more indices at the ends of its last dims, fewer if it is negative."""
    pad = integers(pad)
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise LayoutError(
            f"pad must be a pair for each of the last dims, got {tuple(pad)} for {x.ndim} dims"
        )
    ends = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    _check_mode(x, len(ends), mode)
    for dim, pair in ends.items():
        _check_ends(x, dim, pair, mode)
    split = {dim: pair for dim, pair in ends.items() if dim in x.layout.split_dims and any(pair)}
    out = _pad_whole_dims(x, ends, mode, value)
    if mode == "constant":
        out = _pad_constant(out, split, 0.0 if value is None else value)
    else:
        cropped = {dim: (min(0, below), min(0, above)) for dim, (below, above) in split.items()}
        around = mode == "circular"  # what is left after cropping goes around
        out = _pad_constant(out, cropped, 0.0) if around else out
        for dim, (below, above) in split.items():
            out = _pad_from_inside(out, dim, (max(0, below), max(0, above)), mode)
        out = out if around else _pad_constant(out, cropped, 0.0)
    # torch gives a copy where there is nothing to add, so that one may write into it.
    aliased = out.local is x.local or out.local._is_view()
    return out.with_local(out.local.clone()) if aliased else out


def _check_mode(x: Slab, num_padded: int, mode: str) -> None:
    if mode not in ("constant", "reflect", "replicate", "circular"):
        raise unsupported(F.pad, x, f"there is no mode={mode!r}")
    if mode != "constant" and not (x.ndim - num_padded in (1, 2) and 0 < num_padded < 4):
        raise unsupported(F.pad, x, f"there is no {mode} padding of {num_padded} of {x.ndim} dims")


def _check_ends(x: Slab, dim: int, ends: tuple[int, int], mode: str) -> None:
    """Raises, on all ranks alike, where torch would refuse to pad ``dim`` by ``ends``."""
    extent = x.layout.shape[dim]
    left = min(extent + sum(ends), extent + ends[0], extent + ends[1])
    cropped = extent + min(0, ends[0]) + min(0, ends[1])
    limits = {"reflect": extent - 1, "circular": cropped, "replicate": math.inf if extent else 0}
    if left < 0 or max(ends) > max(0, limits.get(mode, math.inf)):
        raise LayoutError(
            f"{mode} padding of {ends} does not fit an extent of {extent} (dim {dim})"
        )


def _pad_whole_dims(x: Slab, pairs: Ends, mode: str, value: float | None) -> Slab:
    """Pads the dims that are not split, which is a local matter."""
    ends = {d: pair for d, pair in pairs.items() if d not in x.layout.split_dims and any(pair)}
    if not ends:
        return x
    first = min(pairs)
    flat = [n for dim in reversed(range(first, x.ndim)) for n in ends.get(dim, (0, 0))]
    layout = x.layout
    for dim, pair in ends.items():
        layout = layout.with_dim(dim, layout.shape[dim] + sum(pair))
    if mode != "constant" and not x.local.numel():
        # torch refuses it. The dtype is that which autocast gives the other ranks.
        dtype = F.pad(x.local.new_zeros((1,) * x.ndim), [0] * len(flat), mode, value).dtype
        return x.with_local(
            empty_output(layout.box(x.mesh.coords).shape, x.local.to(dtype)), layout
        )
    return x.with_local(F.pad(x.local, flat, mode, value), layout)


def _pad_constant(x: Slab, ends: Ends, value: float) -> Slab:
    """``fetch`` fills what lies outside."""
    if not any(any(pair) for pair in ends.values()):
        return x
    windows = tuple(_window(*ends[dim]) if dim in ends else None for dim in range(x.ndim))
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, windows)
    return x.with_local(fetch(x.local, planned.exchange, x.mesh, fill=value), planned.output)


def _pad_from_inside(x: Slab, dim: int, ends: tuple[int, int], mode: str) -> Slab:
    """Pads the split ``dim`` with rows of the tensor itself, fetched by the ranks at its ends."""
    extent, split = x.layout.shape[dim], x.layout.splits[dim]
    assert split is not None
    if not any(ends):
        return x
    below, above = ends
    rows = {
        "reflect": (Span(1, below + 1), Span(extent - 1 - above, extent - 1)),
        "replicate": (Span(0, min(1, below)), Span(extent - min(1, above), extent)),
        "circular": (Span(extent - below, extent), Span(0, above)),
    }[mode]
    parts = [
        _laid_out(_fetch_rows(x, dim, span, at_end=end), dim, mode, size)
        for end, (span, size) in enumerate(zip(rows, ends, strict=True))
    ]
    cuts = output_cuts(_window(below, above), split.cuts)
    layout = x.layout.with_dim(dim, cuts.extent, Split(split.axis, cuts))
    return x.with_local(torch.cat([parts[0], x.local, parts[1]], dim), layout)


def _fetch_rows(x: Slab, dim: int, rows: Span, *, at_end: int) -> Tensor:
    exchange = _plan_rows(x.mesh.grid, x.mesh.rank, x.layout, dim, rows, at_end)
    return fetch(x.local, exchange, x.mesh)


@lru_cache(maxsize=1024)
def _plan_rows(
    grid: Grid, rank: int, source: Layout, dim: int, rows: Span, at_end: int
) -> Exchange:
    """The first rank along the dim's axis (the last one ``at_end``) asks for ``rows``."""
    split = source.splits[dim]
    assert split is not None
    asking = split.cuts.num - 1 if at_end else 0

    def wanted(rank: int) -> Box:
        coords = grid.coords[rank]
        asked = rows if coords[split.axis] == asking else Span(rows.start, rows.start)
        return source.box(coords).with_span(dim, asked)

    return plan_exchange(grid, rank, source, [wanted(r) for r in range(grid.num_ranks)])


def _laid_out(rows: Tensor, dim: int, mode: str, size: int) -> Tensor:
    """The fetched rows in the order and number in which they pad."""
    if not rows.shape[dim]:
        return rows
    if mode == "reflect":
        return rows.flip(dim)
    return (
        rows.expand(*rows.shape[:dim], size, *rows.shape[dim + 1 :])
        if mode == "replicate"
        else rows
    )
