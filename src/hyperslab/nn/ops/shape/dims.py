"""Dims in another order, new dims, and what a complex number's parts make of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, integers
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.slab import Slab, getter


def check_dim(dim: int, ndim: int) -> int:
    """``dim``, which may count from the end, as a dim of a tensor of ``ndim`` dims."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def check_dims(dims: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """One dim or several, each given once, as ``check_dim`` gives them."""
    found = tuple(check_dim(dim, ndim) for dim in integers(dims))
    if len(set(found)) < len(found):
        raise LayoutError(f"dims {dims} of a tensor of {ndim} dims name one of them twice")
    return found


def unpacked(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dims given one by one or as one sequence."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else args


@define("shape", torch.permute, Tensor.permute)
def permute(x: Slab, *dims: Any, **kwargs: Any) -> Slab:
    """``x`` with its dims, and their splits, in another order."""
    order = check_dims(unpacked(dims or (kwargs["dims"],)), x.ndim)
    if len(order) != x.ndim:
        raise LayoutError(f"dims {order} are not those of a tensor of {x.ndim} dims")
    return x.viewed(x.local.permute(order), _permuted(x.layout, order))


@lru_cache(maxsize=4096)
def _permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    return Layout(
        tuple(layout.shape[dim] for dim in order), tuple(layout.splits[dim] for dim in order)
    )


@define("shape", torch.transpose, Tensor.transpose, torch.swapdims, Tensor.swapdims)
def transpose(x: Slab, dim0: int, dim1: int) -> Slab:
    """``x`` with two dims exchanged."""
    order = list(range(x.ndim))
    first, second = check_dim(dim0, x.ndim), check_dim(dim1, x.ndim)
    order[first], order[second] = second, first
    return permute(x, order)


@define("shape", torch.swapaxes, Tensor.swapaxes)
def swapaxes(x: Slab, axis0: int, axis1: int) -> Slab:
    """``transpose`` by another name."""
    return transpose(x, axis0, axis1)


@define("shape", torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis)
def movedim(x: Slab, source: int | Sequence[int], destination: int | Sequence[int]) -> Slab:
    """``x`` with the dims ``source`` at the places ``destination``, the others in order."""
    sources, places = check_dims(source, x.ndim), check_dims(destination, x.ndim)
    if len(sources) != len(places):
        raise LayoutError(f"{len(sources)} dims cannot move to {len(places)} places")
    others = iter([dim for dim in range(x.ndim) if dim not in sources])
    moved = dict(zip(places, sources, strict=True))
    return permute(x, [moved[at] if at in moved else next(others) for at in range(x.ndim)])


@define("shape", torch.t, Tensor.t)
def t(x: Slab) -> Slab:
    """The transpose of a matrix; fewer dims stay as they are."""
    if x.ndim > 2:
        raise LayoutError(f"t takes at most 2 dims, got {tuple(x.shape)}")
    return permute(x, range(x.ndim)[::-1])


@define("shape", torch.adjoint, Tensor.adjoint, getter("mH"))
def adjoint(x: Slab) -> Any:
    """The matrices in the last two dims, transposed and conjugated."""
    return mt(x).conj()


@define("shape", getter("mT"))
def mt(x: Slab) -> Slab:
    """The matrices in the last two dims, transposed."""
    if x.ndim < 2:
        raise LayoutError(f"a matrix has 2 dims, got {tuple(x.shape)}")
    return transpose(x, -2, -1)


@define("shape", getter("T"))
def reversed_dims(x: Slab) -> Slab:
    """``x`` with its dims backwards, which torch warns of where they are not 2."""
    return x.viewed(x.local.T, _permuted(x.layout, tuple(range(x.ndim)[::-1])))


@define("shape", getter("H"))
def matrix_adjoint(x: Slab) -> Any:
    """The adjoint of one matrix."""
    if x.ndim != 2:
        raise LayoutError(f"x.H takes 2 dims, got {tuple(x.shape)}: x.mH takes more")
    return adjoint(x)


@define("shape", torch.unsqueeze, Tensor.unsqueeze)
def unsqueeze(x: Slab, dim: int) -> Slab:
    """``x`` with a dim of extent 1 before ``dim``."""
    at = check_dim(dim, x.ndim + 1)
    return x.viewed(x.local.unsqueeze(at), _with_new_dim(x.layout, at))


@lru_cache(maxsize=4096)
def _with_new_dim(layout: Layout, at: int) -> Layout:
    shape, splits = layout.shape, layout.splits
    return Layout((*shape[:at], 1, *shape[at:]), (*splits[:at], None, *splits[at:]))


@define("shape", torch.detach, Tensor.detach)
def detach(x: Slab) -> Slab:
    """``x`` without its past, which shares its memory."""
    return x.detached(x.local.detach())


@define("shape", torch.detach_, Tensor.detach_)
def detach_(x: Slab) -> Slab:
    """``x`` itself, cut off from its past."""
    x.local.detach_()
    return x


@define("shape", torch.view_as_real)
def view_as_real(x: Slab) -> Slab:
    """The real and imaginary parts of complex numbers along a new last dim."""
    layout = Layout((*x.layout.shape, 2), (*x.layout.splits, None))
    return x.viewed(torch.view_as_real(x.local), layout)


@define("shape", torch.view_as_complex)
def view_as_complex(x: Slab) -> Slab | Tensor:
    """Complex numbers whose parts lie along the last dim, which is whole on every rank."""
    if not x.ndim or x.layout.splits[-1]:
        raise unsupported(torch.view_as_complex, x, "its last dim is split")
    layout = Layout(x.layout.shape[:-1], x.layout.splits[:-1])
    local = torch.view_as_complex(x.local)
    return x.viewed(local, layout) if layout.shape else local


def _make_part_of_complex(name: str) -> None:
    function = getattr(torch, name)

    @define("shape", function, getter(name))
    def part(x: Slab) -> Slab:
        return x.viewed(function(x.local), x.layout)


_make_part_of_complex("real")
_make_part_of_complex("imag")
