"""Elements mirrored, moved around or repeated along some dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, Split, Strided, cut_evenly, integers, plan_windows
from hyperslab.nn.align import check_operands
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.shape.dims import check_dim, check_dims, transpose, unpacked
from hyperslab.nn.ops.shape.join import join
from hyperslab.nn.ops.shape.reshape import make_like_other
from hyperslab.nn.ops.shape.select import choose_along, take_along
from hyperslab.nn.slab import Slab
from hyperslab.nn.view_copy import as_readable, recut_view


@define("shape", torch.flip, Tensor.flip)
def flip(x: Slab, *dims: Any, **kwargs: Any) -> Slab:
    """``x`` backwards along ``dims``: each rank fetches the mirror image of its box."""
    mirrored = check_dims(unpacked(dims or (kwargs["dims"],)), x.ndim)
    reads = tuple(
        Strided(range(x.layout.shape[dim])[::-1]) if split and dim in mirrored else None
        for dim, split in enumerate(x.layout.splits)
    )
    planned = plan_windows(x.mesh.grid, x.mesh.rank, x.layout, reads)
    piece = fetch(x.local, planned.exchange, x.mesh)
    return x.with_local(piece.flip(mirrored), planned.output)


@define("shape", torch.fliplr, Tensor.fliplr)
def fliplr(x: Slab) -> Slab:
    """``x`` backwards along dim 1."""
    return flip(x, 1)


@define("shape", torch.flipud, Tensor.flipud)
def flipud(x: Slab) -> Slab:
    """``x`` backwards along dim 0."""
    return flip(x, 0)


@define("shape", torch.rot90, Tensor.rot90)
def rot90(x: Slab, k: int = 1, dims: Sequence[int] = (0, 1)) -> Slab:
    """``x`` turned ``k`` times from the first to the second of two dims."""
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


@define("shape", torch.roll, Tensor.roll)
def roll(x: Slab, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Slab:
    """``x`` moved by ``shifts`` along ``dims``; what leaves at one end enters at the other."""
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


@define("shape", Tensor.repeat)
def repeat(x: Slab, *repeats: Any, **kwargs: Any) -> Slab:
    """``x`` so many times along each dim, one after the other; new dims come first."""
    times = integers(unpacked(repeats or tuple(kwargs.values())))
    if len(times) < x.ndim or min(times, default=0) < 0:
        raise LayoutError(f"cannot repeat a tensor of shape {tuple(x.shape)} {times} times")
    x = _with_leading_dims(x, len(times))
    whole = [1 if split else num for split, num in zip(x.layout.splits, times, strict=True)]
    for dim in x.layout.split_dims:
        x = _repeat_split_dim(x, dim, times[dim])
    layout = x.layout
    for dim, num in enumerate(whole):
        if num != 1:
            layout = layout.with_dim(dim, num * layout.shape[dim])
    return x.with_local(x.local.repeat(whole), layout)


def _with_leading_dims(x: Slab, num_dims: int) -> Slab:
    new = num_dims - x.ndim
    layout = Layout((1,) * new + x.layout.shape, (None,) * new + x.layout.splits)
    return x.viewed(x.local[(None,) * new], layout) if new else x


def _repeat_split_dim(x: Slab, dim: int, num: int) -> Slab:
    """``x`` so many times along a dim that is then cut evenly."""
    split, extent = x.layout.splits[dim], num * x.layout.shape[dim]
    assert split is not None
    if num == 0:
        return take_along(x, dim, range(0))
    cuts = Split(split.axis, cut_evenly(extent, split.cuts.num))
    return x if num == 1 else join([x] * num, dim, x.layout.with_dim(dim, extent, cuts))


@define("shape", torch.tile, Tensor.tile)
def tile(x: Slab, *dims: Any, **kwargs: Any) -> Slab:
    """``repeat`` along the last dims."""
    times = integers(unpacked(dims or tuple(kwargs.values())))
    return repeat(x, *(1,) * (x.ndim - len(times)), *times)


@define("shape", torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(
    x: Slab | Tensor,
    repeats: int | Slab | Tensor | None = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Slab:
    """Each index along ``dim`` so many times in a row, all alike or each by its own number."""
    x = check_operands(torch.repeat_interleave, x, repeats)  # type: ignore[arg-type]
    if repeats is None or (dim is None and x.ndim != 1):
        raise unsupported(torch.repeat_interleave, x, "it goes across all dims")
    dim = check_dim(dim or 0, x.ndim)
    extent, split = x.layout.shape[dim], x.layout.splits[dim]
    if isinstance(repeats, Tensor) and repeats.numel() != 1:
        if tuple(repeats.shape) != (extent,):
            raise LayoutError(
                f"repeats of shape {tuple(repeats.shape)} for dim {dim} of extent {extent}"
            )
        chosen = torch.repeat_interleave(repeats, output_size=output_size)
        return choose_along(x, dim, chosen)
    times = int(repeats)
    if times < 0:
        raise LayoutError(f"repeats must not be negative, got {times}")
    cuts = split and Split(split.axis, split.cuts.scaled(times))
    local = x.local.repeat_interleave(times, dim)
    return x.with_local(local, x.layout.with_dim(dim, times * extent, cuts))


@define("shape", Tensor.expand)
def expand(x: Slab, *sizes: Any, implicit: bool = False, **kwargs: Any) -> Slab:
    """A view of ``x`` with dims of extent 1 as long as asked for; new dims come first."""
    shape = integers(unpacked(sizes or tuple(kwargs.values())))
    new = len(shape) - x.ndim
    extents = (*(1,) * new, *x.layout.shape)
    fits = new >= 0 and all(
        n in (m, -1 if dim >= new else m) or (m == 1 and n >= 0)
        for dim, (n, m) in enumerate(zip(shape, extents, strict=True))
    )
    if not fits:
        raise LayoutError(f"cannot expand a tensor of shape {tuple(x.shape)} to {shape}")
    grown = [dim for dim, n in enumerate(shape) if n not in (extents[dim], -1)]
    whole = x.layout.whole_along([dim - new for dim in grown])
    x = _with_leading_dims(recut_view(x, whole), len(shape))
    layout = x.layout
    for dim in grown:
        layout = layout.with_dim(dim, shape[dim])
    out = x.viewed(x.local.expand(layout.box(x.mesh.coords).shape), layout)
    # Torch refuses to write into it, but would not on ranks that hold nothing.
    empty = any(not span.size for split in layout.splits if split for span in split.cuts.spans)
    return as_readable(x, out) if grown and empty else out


make_like_other("expand_as", expand)


@define("shape", torch.broadcast_to, Tensor.broadcast_to)
def broadcast_to(x: Slab, size: Sequence[int]) -> Slab:
    """``expand`` by another name."""
    return expand(x, size)


@define("shape", torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[Slab | Tensor, ...]:
    """Every tensor expanded to the shape that all of them broadcast to."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Sequence) else tensors
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in given))
    return tuple(t.expand(shape) for t in given)
