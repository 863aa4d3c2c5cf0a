"""Moving a Slab to another layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hyperslab.comm.fetch import fetch
from hyperslab.comm.journal import journal
from hyperslab.layout import Layout, plan_recut
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


def gather(x: Slab | Tensor) -> Tensor:
    """The whole tensor, on every rank. A plain tensor is whole already.

    Collective over the mesh. Differentiable: each rank's gradient goes to the owners and is added.
    """
    if isinstance(x, Tensor):
        return x
    journal.note(gather, (x,))
    return whole_along(x, x.layout.split_dims).local
