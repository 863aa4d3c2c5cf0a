"""``x[index] = value`` and ``x.copy_(value)``: each rank writes what falls into its box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.layout import Entry, Layout
from hyperslab.nn.align import localize
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.shape.entries import as_tuple, is_mask, parse_index
from hyperslab.nn.ops.shape.select import chosen_layout, local_index, take
from hyperslab.nn.slab import Slab, check_one_grid


@define("shape", Tensor.copy_)
def copy_(self: Slab | Tensor, src: Slab | Tensor, non_blocking: bool = False) -> Slab:
    """Writes ``src``, broadcast, into all of a Slab."""
    x = _check_target(Tensor.copy_, self, src)
    x.local.copy_(_localized(src, x.layout, x), non_blocking)
    return x


@define("shape", Tensor.__setitem__)
def setitem(x: Slab | Tensor, index: Any, value: Any) -> None:
    """Writes ``value``, broadcast, into the part of ``x`` that ``index`` names."""
    given = as_tuple(index)
    x = _check_target(Tensor.__setitem__, x, value, *given)
    if len(given) == 1 and _is_split_mask(given[0], x):
        _fill_where(x, given[0], value)
        return
    entries, tensors = parse_index(x, given)
    sliced, dropped = _sliced(entries, x.layout)
    part = take(x, sliced)
    if tensors and (any(dropped) or any(part.layout.splits[dim] for dim in tensors)):
        raise unsupported(Tensor.__setitem__, x, "tensors of indices meet a split dim")
    layout = chosen_layout(part.layout, tensors) if tensors else part.layout
    if isinstance(value, Tensor | Slab):
        value = _with_dims(value, [False] * len(layout.shape) if tensors else dropped)
    part.local[local_index(tensors) if tensors else ...] = _localized(value, layout, x)


def _check_target(function: Any, x: Slab | Tensor, *others: Any) -> Slab:
    """``x``, if it is a Slab: no split tensor is written into a plain one."""
    if isinstance(x, Slab):
        return x
    slab = next(other for other in others if isinstance(other, Slab))
    why = "it would write into a plain tensor, which every rank holds whole"
    raise unsupported(function, slab, why)


def _sliced(entries: Sequence[Entry], layout: Layout) -> tuple[tuple[Entry, ...], list[bool]]:
    """The entries with slices for numbers along split dims, and for each dim whether it is such.

    A slice leaves the index with the rank that owns it.
    """
    splits = iter(layout.splits)
    sliced: list[Entry] = []
    dropped: list[bool] = []
    for entry in entries:
        is_split = entry is not None and next(splits) is not None
        if not isinstance(entry, int):
            dropped.append(False)
        elif is_split:
            dropped.append(True)
            entry = range(entry, entry + 1)
        sliced.append(entry)
    return tuple(sliced), dropped


def _with_dims(value: Slab | Tensor, dropped: Sequence[bool]) -> Slab | Tensor:
    """``value`` with a dim of extent 1 for each that the index dropped and the part still has."""
    ndim = len(value.shape)
    extra = max(0, ndim - dropped.count(False))
    if any(extent != 1 for extent in value.shape[:extra]):
        raise LayoutError(
            f"a value of shape {tuple(value.shape)} has more dims than what it is assigned to"
        )
    if extra:
        value = value.reshape(value.shape[extra:])
    left, entries = ndim - extra, list[slice | None]()
    for is_dropped in reversed(dropped):
        if left:
            entries.append(None if is_dropped else slice(None))
            left -= not is_dropped
    return value[tuple(reversed(entries))] if None in entries else value  # type: ignore[index]


def _localized(value: Any, layout: Layout, x: Slab) -> Any:
    """This rank's part of ``value``, broadcast to ``layout`` on the mesh of ``x``."""
    if not isinstance(value, Tensor | Slab):
        return value
    if isinstance(value, Slab):
        check_one_grid((value.mesh.grid, x.mesh.grid))
    if tuple(torch.broadcast_shapes(layout.shape, tuple(value.shape))) != layout.shape:
        raise LayoutError(
            f"a value of shape {tuple(value.shape)} cannot be written into shape {layout.shape}"
        )
    return localize(value, layout, layout.box(x.mesh.coords))


def _is_split_mask(entry: Any, x: Slab) -> bool:
    if isinstance(entry, Slab):
        return is_mask(entry.local) and bool(entry.ndim)
    if not isinstance(entry, Tensor | np.ndarray) or not entry.ndim:
        return False
    return is_mask(torch.as_tensor(entry)) and any(x.layout.splits[: entry.ndim])


def _fill_where(x: Slab, mask: Any, value: Any) -> None:
    """Writes one number where ``mask``, whose dims are the first of ``x``, is true."""
    mask = mask if isinstance(mask, Slab) else torch.as_tensor(mask)
    num = len(mask.shape)
    prefix = Layout(x.layout.shape[:num], x.layout.splits[:num])
    if tuple(mask.shape) != prefix.shape:
        raise IndexError(f"a mask of shape {tuple(mask.shape)} for a tensor of {tuple(x.shape)}")
    if isinstance(value, Slab) or (isinstance(value, Tensor) and value.numel() != 1):
        raise unsupported(
            Tensor.__setitem__, x, "a mask along a split dim takes one number for all it marks"
        )
    x.local[_localized(mask, prefix, x)] = value
