"""Gradients of plain tensors that meet Slabs and are no weights of a parallelized module.

Such a tensor is whole on every rank, and a backward pass brings each rank a part of the gradient of
the sum of all ranks' losses. The gradient of one process is the mean of the parts. DDP and FSDP2
take it of a module's weights; here it is taken where others meet Slabs, on the way back to them:
learnable tensors in a list or in a loss, arguments of a module, weights computed from others. To
take it twice, as of a weight norm, changes nothing. So all leaves that a backward pass gives a part
to have their means taken together at its end, in one message; a message each takes those that
somebody sees before: hooks, ``torch.autograd.grad``, what a tensor was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from hyperslab.comm.graph import is_watched
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import reduce_sum
from hyperslab.errors import UnsupportedOp
from hyperslab.layout import AXES
from hyperslab.nn.registry import prepare_arguments
from hyperslab.nn.replica import average_, averaging_mesh
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.nn.view_copy import writes_in_place

_sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Modules whose gradients FSDP2 averages, and where they hold their weights."""
_gathered: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weights as FSDP2 puts them together for a forward pass, as far as they have been met."""


def leave_to_fsdp(module: nn.Module) -> None:
    """Says that FSDP2 averages the gradients of the weights that ``module`` has now."""
    tables = [part._parameters for part in module.modules()]
    _sharded[module] = [(table, name) for table in tables for name in table]


@prepare_arguments
def with_means(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with what takes the mean over ranks behind those whose gradients need it.

    Collective over the mesh in the backward pass.
    """
    if peek_interpreter_stack() is not None:
        check_no_transform(_mesh_of(args, kwargs))
    if not _has_outsider(args) and not (kwargs and _has_outsider(kwargs.values())):
        return args, kwargs
    mesh = _mesh_of(args, kwargs)
    if mesh is None or mesh.num_ranks == 1:
        return args, kwargs
    ready = tuple([with_mean(arg, mesh) for arg in args])
    if ready and ready[0] is not args[0] and writes_in_place(function, kwargs):
        ready = (args[0], *ready[1:])
    return ready, {name: with_mean(arg, mesh) for name, arg in kwargs.items()}


def _mesh_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mesh | None:
    for arg in args:
        if isinstance(arg, Slab):
            return arg.mesh
    leaves = tree_leaves((args, kwargs), is_leaf=is_slab)
    return next((leaf.mesh for leaf in leaves if isinstance(leaf, Slab)), None)


def with_mean(value: Any, mesh: Mesh) -> Any:
    """``value``, or the tensors in it, with such a mean where it is needed."""

    def visit(leaf: Any) -> Any:
        return mean_of(leaf, mesh) if _is_outsider(leaf) else leaf

    if isinstance(value, tuple | list) and _has_outsider(value):
        return tree_map(visit, value, is_leaf=is_slab)
    return visit(value)


def check_no_transform(mesh: Mesh | None) -> None:
    """Raises within ``torch.func``'s transforms on several ranks."""
    if mesh is not None and mesh.num_ranks > 1 and peek_interpreter_stack() is not None:
        raise UnsupportedOp(
            f"Slabs on {mesh.grid.describe()} cannot be used within torch.func.grad, vmap and the "
            "like, which messages between ranks do not pass: torch.autograd.grad gives gradients"
        )


def mean_of(x: Tensor, mesh: Mesh) -> Tensor:
    """``x``, whose gradient becomes the mean of those of all ranks."""
    if mesh.num_ranks > 1 and x.layout != torch.strided:
        raise UnsupportedOp(
            f"a tensor of layout {x.layout} that wants a gradient cannot meet Slabs on "
            f"{mesh.grid.describe()}: its gradient would be one rank's part; detach it, or make "
            "it a parameter of the parallelized module"
        )
    return _Mean.apply(x, mesh) if mesh.num_ranks > 1 else x  # type: ignore[no-untyped-call]


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if (leaf := _unseen_leaf(ctx, grad)) is not None:
            _average_at_end(leaf, ctx.mesh)
            return grad, None
        part = grad.to(ctx.mesh.device) / ctx.mesh.num_ranks  # before the sum, as half overflows
        return reduce_sum(part, ctx.mesh, AXES).to(grad.device), None


def _unseen_leaf(node: Any, grad: Tensor) -> Tensor | None:
    """The leaf whose gradient ``grad`` is added to, if nobody sees it before the pass ends.

    Ranks that run the same graph with the same hooks find the same.
    """
    behind = node.next_functions[0][0]
    leaf: Tensor | None = getattr(behind, "variable", None)
    if leaf is None or torch.is_grad_enabled() or is_watched():
        return None
    if leaf.device != node.mesh.device or grad.layout != torch.strided:
        return None
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return None
    return leaf if _is_accumulated(behind) else None


def _is_accumulated(node: Any) -> bool:
    """Whether this pass adds to ``grad`` of the leaf that ``node`` belongs to."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # as torch.autograd.grad runs, which returns it instead
        return False


class _Together:
    """The leaves whose means are taken at the end of one backward pass."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[Tensor, Mesh]] = {}
        Variable._execution_engine.queue_callback(self.average)

    def average(self) -> None:
        """Makes their gradients the means over the ranks. Collective over the mesh.

        What was in them before is equal on all ranks, or its mean is as good to who adds it up.
        """
        alike: dict[tuple[object, ...], tuple[Mesh, list[Tensor]]] = {}
        for leaf, mesh in self.leaves.values():
            if leaf.grad is not None:
                alike.setdefault((mesh.grid, leaf.grad.dtype), (mesh, []))[1].append(leaf.grad)
        for mesh, grads in alike.values():
            average_(grads, mesh)


_passes: WeakValueDictionary[int, _Together] = WeakValueDictionary()
"""Those of the backward passes that are running, which keep them alive, by their numbers."""


def _average_at_end(leaf: Tensor, mesh: Mesh) -> None:
    number = torch._C._current_graph_task_id()
    together = _passes.get(number)
    if together is None:
        together = _passes[number] = _Together()
    together.leaves[id(leaf)] = (leaf, mesh)


def _has_outsider(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Slab):
            continue
        if isinstance(value, (tuple, list)):
            if _has_outsider(value):
                return True
        elif _is_outsider(value):
            return True
    return False


def _is_outsider(x: Any) -> bool:
    """Whether ``x`` is a plain tensor of whose gradient nobody takes the mean.

    What a compiler follows has been looked at before.
    """
    if not isinstance(x, Tensor) or not x.requires_grad:
        return False
    if averaging_mesh(x) is not None or _is_gathered(x):
        return False
    if isinstance(x, FakeTensor | FunctionalTensor | DTensor):
        return False
    return type(x.grad_fn) is not _Mean._backward_cls


def _is_gathered(x: Tensor) -> bool:
    """Whether FSDP2 put ``x`` together, or what it is a view of."""
    if not len(_sharded):
        return False
    source = x if x.is_leaf else x._base
    if source is None:
        return False
    if source not in _gathered:
        places = (place for each in _sharded.values() for place in each)
        if not any(table.get(name) is source for table, name in places):
            return False
        _gathered[source] = True
    return True


def is_plain_outsider(x: Any) -> bool:
    """As far as Dynamo can tell: parameters are taken for weights of a parallelized module."""
    return bool(x.requires_grad) and not isinstance(x, nn.Parameter)
