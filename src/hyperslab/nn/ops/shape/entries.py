"""What may stand between the brackets of ``x[...]``, as torch reads it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hyperslab.layout import Entry
from hyperslab.nn.op import unsupported
from hyperslab.nn.slab import Slab

Tensors = dict[int, Tensor]
"""Tensors of indices, by the dim that they index."""


class Index(NamedTuple):
    """An index as torch applies it: numbers and slices first, then tensors along what is left."""

    entries: tuple[Entry, ...]
    tensors: Tensors


def parse_index(x: Slab, index: Any) -> Index:
    """``index`` with every entry checked against the shape of ``x``, so that all ranks agree."""
    given = [as_entry(x, entry) for entry in as_tuple(index)]
    num_indexed = sum(map(_num_dims, given))
    dots = [i for i, entry in enumerate(given) if entry is ...]
    if num_indexed > x.ndim or len(dots) > 1:
        raise IndexError(f"too many indices for a tensor of {x.ndim} dims: {index!r}")
    at = dots[0] if dots else len(given)
    given[at : at + 1] = [slice(None)] * (x.ndim - num_indexed)
    entries: list[Entry] = []
    tensors: Tensors = {}
    dim, left = 0, 0  # the dim of x that is next, and of what numbers and slices leave of it
    for entry in given:
        extents = x.layout.shape[dim : dim + _num_dims(entry)]
        if isinstance(entry, Tensor):
            _check_tensor(entry, extents, dim)
            parts = entry.nonzero(as_tuple=True) if is_mask(entry) else (entry,)
            tensors |= {left + i: part for i, part in enumerate(parts)}
            new: Sequence[Entry] = [range(extent) for extent in extents]
        elif isinstance(entry, bool):  # chooses all or nothing of a new dim
            tensors[left] = torch.zeros(int(entry), dtype=torch.long)
            new = [None]
        else:
            new = [None if entry is None else _in_range(entry, extents[0], dim)]
        entries += new
        dim += len(extents)
        left += sum(not isinstance(entry, int) for entry in new)
    return Index(tuple(entries), tensors)


def as_tuple(index: Any) -> tuple[Any, ...]:
    """The entries of ``index``. A short list is a tuple unless it holds nothing but numbers."""
    if isinstance(index, list) and len(index) < 32 and any(map(_makes_tuple, index)):
        return tuple(index)
    return index if isinstance(index, tuple) else (index,)


def _makes_tuple(entry: Any) -> bool:
    if entry is None or entry is ...:
        return True
    return isinstance(entry, Tensor | Slab | Sequence | np.ndarray | slice)


def as_entry(x: Slab, entry: Any) -> Any:
    """An entry of an index of ``x`` as an int, slice, None, Ellipsis, bool or plain tensor."""
    if entry is None or entry is ... or isinstance(entry, bool | int | slice):
        return entry
    if isinstance(entry, Slab):
        if entry.layout.split_dims:
            raise unsupported(Tensor.__getitem__, entry, "it is an index, and it is split")
        entry = entry.local
    elif isinstance(entry, np.ndarray | np.bool_):
        entry = torch.as_tensor(entry)
    elif isinstance(entry, Sequence) and not isinstance(entry, str):
        entry = _as_tensor(x, entry)
    if not isinstance(entry, Tensor):
        return as_int(entry)
    if entry.ndim or entry.is_floating_point() or entry.is_complex():
        return entry
    return bool(entry) if is_mask(entry) else int(entry)


def _as_tensor(x: Slab, entries: Sequence[Any]) -> Tensor:
    for entry in entries:
        if isinstance(entry, Tensor | Slab | slice) or entry is None or entry is ...:
            raise unsupported(Tensor.__getitem__, x, "a list among its indices holds no numbers")
    found = torch.as_tensor(entries)
    return found if found.numel() else found.long()


def is_mask(entry: Tensor) -> bool:
    return entry.dtype in (torch.bool, torch.uint8)


def _num_dims(entry: Any) -> int:
    """How many dims of the tensor an entry is about."""
    if entry is None or entry is ... or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and is_mask(entry) else 1


def _in_range(entry: int | slice, extent: int, dim: int) -> int | range:
    if isinstance(entry, slice):
        if entry.step is not None and as_int(entry.step) < 1:
            raise ValueError(f"a slice's step must be greater than 0, got {entry.step}")
        return range(*entry.indices(extent))
    if not -extent <= entry < extent:
        raise IndexError(f"index {entry} is out of range for dim {dim} of extent {extent}")
    return entry % extent


def _check_tensor(entry: Tensor, extents: tuple[int, ...], dim: int) -> None:
    """Raises where torch would, also on ranks whose piece is empty and would not look."""
    if is_mask(entry):
        if tuple(entry.shape) != extents:
            raise IndexError(
                f"a mask of shape {tuple(entry.shape)} for extents {extents} from dim {dim} on"
            )
    elif entry.is_floating_point() or entry.is_complex():
        raise IndexError(f"tensors used as indices must be integers or bools, got {entry.dtype}")
    elif not entry.is_cuda:  # there the kernel checks
        check_indices(entry, extents[0], dim)


def check_indices(indices: Tensor, extent: int, dim: int, *, from_end: bool = True) -> None:
    """Raises if some of ``indices`` are out of range; they may count ``from_end``."""
    if not indices.numel():
        return
    least, most = (int(end) for end in indices.aminmax())
    if least < (-extent if from_end else 0) or most >= extent:
        raise IndexError(
            f"indices from {least} to {most} are out of range for dim {dim} of extent {extent}"
        )
