"""Elements in another order along some dims: mirrored, or moved around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import Strided, plan_windows
from hyperslab.nn.registry import integers, numpy_names, register, unsupported
from hyperslab.nn.rules.dims import check_dim, check_dims, transpose, unpacked
from hyperslab.nn.rules.join import join
from hyperslab.nn.rules.select import take_along
from hyperslab.nn.slab import Slab


@register(torch.flip, Tensor.flip)
def flip(input: Slab, *dims: Any, **kwargs: Any) -> Slab:
    """``input`` backwards along ``dims``: each rank fetches the mirror image of its box."""
    x = input
    mirrored = check_dims(unpacked(dims or (kwargs["dims"],)), x.ndim)
    reads = tuple(
        Strided(range(x.layout.shape[dim])[::-1]) if split and dim in mirrored else None
        for dim, split in enumerate(x.layout.splits)
    )
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, reads)
    piece = fetch(x.local, planned.exchange, x.mesh)
    return x.with_local(piece.flip(mirrored), planned.output)


@register(torch.fliplr, Tensor.fliplr)
def fliplr(input: Slab) -> Slab:
    """``input`` backwards along dim 1."""
    return flip(input, 1)


@register(torch.flipud, Tensor.flipud)
def flipud(input: Slab) -> Slab:
    """``input`` backwards along dim 0."""
    return flip(input, 0)


@register(torch.rot90, Tensor.rot90)
def rot90(input: Slab, k: int = 1, dims: Sequence[int] = (0, 1)) -> Slab:
    """``input`` turned ``k`` times from the first to the second of two dims."""
    x = input
    if x.ndim < 2:
        raise RuntimeError(f"rot90 turns in a plane, and the tensor has shape {tuple(x.shape)}")
    if len(plane := check_dims(dims, x.ndim)) != 2:
        raise LayoutError(f"rot90 turns from one dim to another, got dims {plane}")
    first, second = plane
    if k % 4 == 0:
        return x.with_local(x.local.clone())
    if k % 4 == 2:
        return flip(x, first, second)
    return transpose(flip(x, second if k % 4 == 1 else first), first, second)


@register(torch.roll, Tensor.roll)
@numpy_names
def roll(input: Slab, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Slab:
    """``input`` moved by ``shifts`` along ``dims``; what leaves at one end enters at the other."""
    x = input
    if dims is None or not integers(dims):
        if x.ndim != 1:
            raise unsupported(torch.roll, x, "without dims= it moves elements across all dims")
        dims = 0
    pairs = integers(shifts), integers(dims)
    if len(pairs[0]) != len(pairs[1]):
        raise LayoutError(f"roll by shifts {pairs[0]} along dims {pairs[1]}: give one for each")
    out = x
    for shift, dim in zip(*pairs, strict=True):
        out = _roll_along(out, shift, check_dim(dim, x.ndim))
    return out.with_local(out.local.clone()) if out.local is x.local else out


def _roll_along(x: Slab, shift: int, dim: int) -> Slab:
    extent = x.layout.shape[dim]
    if x.layout.splits[dim] is None:
        return x.with_local(x.local.roll(shift, dim))
    if not extent or shift % extent == 0:
        return x
    head = extent - shift % extent
    parts = [take_along(x, dim, part) for part in (range(head, extent), range(head))]
    return join(parts, dim, x.layout)
