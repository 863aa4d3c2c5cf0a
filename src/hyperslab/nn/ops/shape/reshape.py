"""Tensors in another shape: the same elements in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.layout import infer_shape, integers, merges_dims, plan_reshape
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.shape.dims import check_dim, unpacked
from hyperslab.nn.slab import Slab
from hyperslab.nn.view_copy import ViewCopy, as_copy, plain_if_number, recut_view


@define("shape", Tensor.view)
def view(x: Slab, *shape: Any, **kwargs: Any) -> Slab | Tensor:
    """``x`` in another global shape; see ``plan_reshape`` for what stays split."""
    sizes = unpacked(shape or tuple(kwargs.values()))
    if any(isinstance(size, torch.dtype) for size in sizes):
        raise unsupported(Tensor.view, x, "a view as another dtype is not supported")
    target = infer_shape(integers(sizes), x.numel())
    before, after = plan_reshape(x.layout, target)
    moved = recut_view(x, before)
    is_split = bool(after.split_dims)
    local = moved.local.reshape(after.box(x.mesh.coords).shape if is_split else after.shape)
    return plain_if_number(moved.viewed(local, after))


@define("shape", Tensor.reshape, torch.reshape)
def reshape(x: Slab, *shape: Any, **kwargs: Any) -> Slab | Tensor:
    """``x`` in another global shape: a view of it where that of the whole tensor is one."""
    out = view(x, *shape, **kwargs)
    if isinstance(out, ViewCopy) or not isinstance(out, Slab):
        return out
    return _settled(x, out) if merges_dims(x.layout.shape, out.layout.shape) else out


def _settled(x: Slab, out: Slab) -> Slab:
    """``out``, or a copy where no rank can know whether torch copies the whole tensor.

    Torch copies where dims that merge are not next to each other in memory. Pieces of one index
    along a dim do not show where it lies, unless it lies outside of all others and merges with
    none.
    """
    strides = x.local.stride()
    hides = any(
        min(span.size for span in split.cuts.spans) < 2
        and (split not in out.layout.splits or strides[dim] < max(strides))
        for dim, split in enumerate(x.layout.splits)
        if split
    )
    return as_copy(x, out) if hides and x.is_view else out


@define("shape", Tensor.contiguous)
def contiguous(x: Slab, memory_format: torch.memory_format = torch.contiguous_format) -> Slab:
    """``x`` in the given order in memory: itself where the whole tensor would be."""
    local = x.local.contiguous(memory_format=memory_format)
    if x.is_part:
        return as_copy(x, x.with_local(local))
    if local is not x.local:
        return x.with_local(local)
    return x if _lies_in_order(x, memory_format) else x.with_local(local.clone())


def _lies_in_order(x: Slab, memory_format: torch.memory_format) -> bool:
    """Whether strides are in order also along dims of which the piece has but one index."""
    order = list(range(x.ndim))
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        order = [0, *order[2:], 1]
    stride = 1
    for dim in reversed(order):
        if x.layout.shape[dim] != 1:
            if x.local.stride(dim) != stride:
                return False
            stride *= max(1, x.local.shape[dim])
    return True


@define("shape", torch.flatten, Tensor.flatten)
def flatten(x: Slab, start_dim: int = 0, end_dim: int = -1) -> Slab | Tensor:
    """``x`` with the dims from ``start_dim`` to ``end_dim`` merged."""
    if not x.ndim:
        return reshape(x, 1)
    first, last = check_dim(start_dim, x.ndim), check_dim(end_dim, x.ndim)
    if first > last:
        raise LayoutError(
            f"flatten from dim {start_dim} to {end_dim} of {x.ndim} dims runs backwards"
        )
    shape = x.layout.shape
    merged = math.prod(shape[first : last + 1])
    return reshape(x, *shape[:first], merged, *shape[last + 1 :])


@define("shape", torch.ravel, Tensor.ravel)
def ravel(x: Slab) -> Slab | Tensor:
    """All elements along one dim."""
    return reshape(x, -1 if x.numel() else 0)


@define("shape", torch.unflatten, Tensor.unflatten)
def unflatten(x: Slab, dim: int, sizes: Sequence[int]) -> Slab | Tensor:
    """``x`` with several dims of ``sizes`` in place of ``dim``."""
    at = check_dim(dim, x.ndim)
    shape = x.layout.shape
    inner = infer_shape(integers(sizes), shape[at])
    return view(x, *shape[:at], *inner, *shape[at + 1 :])


@define("shape", torch.squeeze, Tensor.squeeze)
def squeeze(x: Slab, dim: int | Sequence[int] | None = None) -> Slab | Tensor:
    """``x`` without its dims of extent 1, or those of them in ``dim``."""
    dims = range(x.ndim) if dim is None else integers(dim)
    gone = {check_dim(d, x.ndim) for d in dims} if x.ndim else set()
    return view(x, [n for d, n in enumerate(x.layout.shape) if d not in gone or n != 1])


def make_like_other(name: str, rule: Callable[..., Slab | Tensor]) -> None:
    """Makes ``rule`` that of ``Tensor.<name>``, which takes its shape from another tensor."""

    @define("shape", getattr(Tensor, name))
    def like_other(x: Slab | Tensor, other: Slab | Tensor) -> Slab | Tensor:
        if isinstance(x, Slab):
            return rule(x, tuple(other.shape))
        plain: Tensor = getattr(x, name.removesuffix("_as"))(tuple(other.shape))
        return plain


make_like_other("view_as", view)
make_like_other("reshape_as", reshape)


def _make_at_least(num_dims: int, places: Sequence[Sequence[int]]) -> None:
    """Registers ``atleast_nd``; tensors of n dims get new ones at ``places[n]``, in turn."""

    @define("shape", getattr(torch, f"atleast_{num_dims}d"))
    def at_least(*tensors: Any) -> Any:
        """Each tensor with as many dims of extent 1 as it lacks."""
        if len(tensors) != 1 or not isinstance(tensors[0], Slab | Tensor):
            return tuple(at_least(t) for t in (tensors if len(tensors) > 1 else tensors[0]))
        x = tensors[0]
        for place in places[x.ndim] if x.ndim < num_dims else ():
            x = x.unsqueeze(place)
        return x


_make_at_least(1, [(0,)])
_make_at_least(2, [(0, 0), (0,)])
_make_at_least(3, [(0, 0, 0), (0, 2), (2,)])

define("shape", torch.numel)(Slab.numel)
define("shape", torch.is_floating_point)(Slab.is_floating_point)
define("shape", torch.is_complex)(Slab.is_complex)
