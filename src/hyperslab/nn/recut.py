"""Moving a Slab to another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.journal import journal
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, plan_recut
from hyperslab.nn.registry import integers
from hyperslab.nn.slab import Slab


def recut(x: Slab, target: Layout) -> Slab:
    """``x`` under the layout ``target``; itself where it is there already.

    Collective over the mesh. The gradient goes back the same way.
    """
    if x.layout == target:
        return x
    exchange = plan_recut(x.mesh.grid, x.mesh.rank, x.layout, target)
    return x.with_local(fetch(x.local, exchange, x.mesh), target)


def whole_along(x: Slab, dims: Sequence[int]) -> Slab:
    """``x`` with ``dims`` whole on every rank."""
    return recut(x, x.layout.whole_along(dims))


@overload
def gather(x: Slab | Tensor, dims: None = None) -> Tensor: ...


@overload
def gather(x: Slab, dims: int | Sequence[int]) -> Slab: ...


@overload
def gather(x: Tensor, dims: int | Sequence[int]) -> Tensor: ...


def gather(x: Slab | Tensor, dims: int | Sequence[int] | None = None) -> Slab | Tensor:
    """The whole tensor, on every rank; with ``dims``, a Slab that is whole along these.

    A plain tensor is whole already.

    Collective over the mesh. Differentiable: each rank's gradient goes to the owners and is added.
    """
    if isinstance(x, Tensor):
        return x
    if dims is None:
        journal.note(gather, (x,))
        return whole_along(x, x.layout.split_dims).local
    chosen = [_checked(dim, x) for dim in integers(dims)]
    journal.note(gather, (x, tuple(chosen)))
    return whole_along(x, chosen)


def _checked(dim: int, x: Slab) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(f"gather: there is no dim {dim} in a tensor of {x.layout.describe()}")
    return dim % x.ndim
