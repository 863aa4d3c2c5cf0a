"""How plain tensors become Slabs, Slabs change their layout, and whole tensors come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from hyperslab.comm.agree import agree, agree_about, agree_on
from hyperslab.comm.fetch import fetch
from hyperslab.comm.graph import recompute_first, save_marker
from hyperslab.comm.journal import journal
from hyperslab.comm.mesh import Mesh, check_mesh
from hyperslab.comm.reduce import reduce_sum
from hyperslab.errors import ConfigError, HyperslabError, LayoutError, UnsupportedOp
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import Box, Layout, integers, plan_move, plan_recut, split_over
from hyperslab.nn.outputs import nodes_under
from hyperslab.nn.parallel.outside_tensors import MEAN, check_no_transform
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import is_dynamo_loaded, is_traced

Cuts = Mapping[str, Sequence[int]]


def shard(
    tensor: Tensor,
    mesh: Mesh,
    *,
    cuts: Cuts | None = None,
    axes: Sequence[str | None] | None = None,
) -> Slab:
    """The Slab of ``tensor``, which every rank holds whole and alike (a few elements are compared).

    Dims map to axes by their number, as in (N, C, D, H, W); ``axes`` names them where that is not
    so, as for a label map: ``axes=("sample", "depth", "height", "width")``. ``cuts`` gives uneven
    bounds along some axes: ``cuts={"depth": [0, 9, 16]}``.

    Collective over the mesh. The gradient that reaches ``tensor`` is the whole one, on every rank.
    """
    tensor = _checked_tensor(tensor, mesh)
    given = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, cuts, axes)
    agree_on("the tensors given to shard", given, mesh)
    if mesh.num_ranks > 1 and tensor.numel() and not is_traced():
        advice = (
            "it takes the same whole tensor on every rank (seed and shuffle alike); from_local "
            "takes pieces"
        )
        agree_about("the values given to shard", _probe(tensor), mesh, advice)
    layout = split_over(tuple(tensor.shape), mesh.grid, axes, cuts)
    if mesh.num_ranks == 1:
        return Slab(tensor, layout, mesh)
    return Slab(_Shard.apply(tensor, layout, mesh), layout, mesh)  # type: ignore[no-untyped-call]


def from_local(
    piece: Tensor,
    mesh: Mesh,
    shape: Sequence[int],
    *,
    cuts: Cuts | None = None,
    axes: Sequence[str | None] | None = None,
) -> Slab:
    """The Slab of a tensor of global ``shape`` of which each rank brings its own ``piece``.

    ``cuts`` and ``axes`` as for ``shard``. Ranks that hold the same box must bring equal pieces.

    Collective over the mesh. The gradient that reaches ``piece`` is that of one process. A piece
    that was computed of another Slab's is none that enters: ``slab.with_local(piece)`` takes it.
    """
    piece = _checked_tensor(piece, mesh)
    shape = tuple(shape)
    given = (shape, piece.dtype, piece.requires_grad, cuts, axes)
    agree_on("what from_local was given", given, mesh)
    layout = split_over(shape, mesh.grid, axes, cuts)
    due = layout.box(mesh.coords).shape
    error: HyperslabError | None = None
    if tuple(piece.shape) != due:
        error = LayoutError(
            f"rank {mesh.rank} brings a piece of shape {tuple(piece.shape)}, but its box of a "
            f"tensor of {layout.describe()} has shape {due}"
        )
    elif mesh.num_ranks > 1 and _comes_of_slabs(piece):
        error = UnsupportedOp(
            f"from_local is given a piece of shape {due} that was computed of another Slab's, "
            f"and would divide its gradient by {mesh.num_ranks} once more: use "
            "slab.with_local(piece), or with_local(piece, layout)"
        )
    agree(error, mesh)
    if not piece.requires_grad:
        return Slab(piece, layout, mesh)
    return Slab(_Enter.apply(piece, layout, mesh), layout, mesh)  # type: ignore[no-untyped-call]


def _comes_of_slabs(piece: Tensor) -> bool:
    """Whether gradients of ``piece`` go to where a tensor entered, or met a Slab, before."""
    found = nodes_under([piece])
    return any(type(node).__name__ in _ENTRIES or MEAN in node.metadata for node in found)


def _probe(tensor: Tensor) -> Tensor:
    """A few of its elements, spread over all of it."""
    places = torch.arange(32) * (tensor.numel() - 1) // 31
    index: list[Tensor] = []
    for extent in reversed(tensor.shape):  # torch.unravel_index does so, and imports sympy for it
        index.insert(0, (places % extent).to(tensor.device))
        places = places // extent
    found = tensor.detach()[tuple(index)].flatten()
    return found.abs() if found.is_complex() else found


def _checked_tensor(tensor: Tensor, mesh: Mesh) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"a plain torch.Tensor was expected, got {type(tensor).__name__}")
    check_mesh(mesh)
    check_no_transform(mesh)
    if is_dynamo_loaded():
        from hyperslab.nn import compile as compile  # Dynamo must know before it meets a Slab
    return _without_subclass(tensor).to(mesh.device)


def _without_subclass(tensor: Tensor) -> Tensor:
    """``tensor`` without what a class such as MONAI's MetaTensor adds: a piece has no use for it.

    Classes that hold their elements otherwise, as DTensor does, stay what they are.
    """
    cls = type(tensor)
    if cls in (Tensor, Parameter) or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(Tensor)


class _Shard(Function):
    """Takes this rank's box; backward puts the whole gradient together on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        save_marker(ctx, tensor)
        piece = tensor[layout.box(mesh.coords).slices_in(Box.whole(layout.shape))]
        return piece.clone(memory_format=memory_format_of(tensor))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        layout, mesh = ctx.layout, ctx.mesh
        whole = plan_recut(mesh.grid, mesh.rank, layout, Layout.unsplit(layout.shape))
        return fetch(_home(grad, layout, mesh), whole, mesh), None, None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        save_marker(ctx, piece)
        return piece.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        return _home(grad, ctx.layout, ctx.mesh), None, None


_ENTRIES = {f"{function.__name__}Backward" for function in (_Shard, _Enter)}


def _home(grad: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The gradient of the loss from that of the sum of all ranks' losses.

    Ranks that hold the same box each carry a part of it.
    """
    return reduce_sum(grad, mesh, mesh.axes_beside(layout.axes)) / mesh.num_ranks


def recut(x: Slab, target: Layout) -> Slab:
    """``x`` under the layout ``target``; itself where it is there already.

    Collective over the mesh. The gradient goes back the same way.
    """
    if x.layout == target:
        return x
    exchange = plan_recut(x.mesh.grid, x.mesh.rank, x.layout, target)
    return x.with_local(fetch(x.local, exchange, x.mesh), target)


def move(x: Slab, mesh: Mesh, target: Layout) -> Slab:
    """``x`` under the layout ``target`` on ``mesh``, which has the same ranks.

    Collective over the mesh. The gradient goes back the same way.
    """
    exchange = plan_move(x.mesh.grid, x.mesh.rank, x.layout, mesh.grid, target)
    return Slab(fetch(x.local, exchange, x.mesh), target, mesh)


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
    if not isinstance(x, Slab):
        raise ConfigError(f"gather takes a Slab or a tensor, got {type(x).__name__}")
    if dims is None:
        journal.note(gather, (x,))
        return whole_along(x, x.layout.split_dims).local
    chosen = [_checked_dim(dim, x) for dim in integers(dims)]
    journal.note(gather, (x, tuple(chosen)))
    return whole_along(x, chosen)


def _checked_dim(dim: int, x: Slab) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(f"gather: there is no dim {dim} in a tensor of {x.layout.describe()}")
    return dim % x.ndim
