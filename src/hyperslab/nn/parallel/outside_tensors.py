"""Gradients of plain tensors that meet Slabs: weights, learnable tensors, what is computed of them.

Such a tensor is whole on every rank, and a backward pass brings each rank a part of the gradient of
the sum of all ranks' losses. The gradient of one process is the mean of the parts. It is taken in
the graph, on the way back to the tensor, so that whoever sees the gradient sees that of one
process: hooks, ``torch.autograd.grad`` by any name, views, what a tensor was computed from. Leaves
whose gradients nobody sees before the pass ends share messages instead (``gradient_averaging``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from hyperslab.comm.graph import TensorSpec, as_operator
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import reduce_sum
from hyperslab.dist_ops.cut_weight import part_of_cut
from hyperslab.errors import UnsupportedOp
from hyperslab.layout import AXES
from hyperslab.nn.dispatch import prepare_arguments
from hyperslab.nn.op import writes_in_place
from hyperslab.nn.parallel.gradient_averaging import (
    Averaging,
    axes_beside_cuts,
    gradient_hook_of,
    has_other_hooks,
    weight_of_number,
)
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import (
    FakeTensor,
    FunctionalTensor,
    is_forward_ad_active,
    peek_interpreter_stack,
    tree_leaves,
    tree_map,
    will_run_in_backward,
)

MEAN = "hyperslab mean"
"""What marks the nodes behind which gradients are means over ranks."""
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
    if peek_interpreter_stack() is not None or is_forward_ad_active():
        check_no_transform(_mesh_of(args, kwargs))
    if len(args) == 1 and not kwargs and type(args[0]) is Slab:  # which has no gradient to average
        return args, kwargs
    mesh = _mesh_of(args, kwargs)
    if mesh is None or mesh.num_ranks == 1:
        return args, kwargs
    ready = tuple([with_mean(arg, mesh) for arg in args])
    if ready and ready[0] is not args[0] and writes_in_place(function, kwargs):
        ready = (args[0], *ready[1:])
    return ready, {name: with_mean(arg, mesh) for name, arg in kwargs.items()} if kwargs else kwargs


def _mesh_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mesh | None:
    for arg in args:
        if isinstance(arg, Slab):
            return arg.mesh
    leaves = tree_leaves((args, kwargs), is_leaf=is_slab)
    return next((leaf.mesh for leaf in leaves if isinstance(leaf, Slab)), None)


def with_mean(value: Any, mesh: Mesh) -> Any:
    """``value``, or the tensors in it, with such a mean where it is needed."""
    if isinstance(value, tuple | list):
        if not _has_learnable(value):
            return value
        return tree_map(lambda leaf: with_mean(leaf, mesh), value, is_leaf=is_slab)
    return mean_of(value, mesh) if _is_learnable(value) else value


def check_no_transform(mesh: Mesh | None) -> None:
    """Raises within transforms of ``torch.func`` and forward-mode derivatives on several ranks."""
    if mesh is None or mesh.num_ranks == 1:
        return
    if is_forward_ad_active():
        raise UnsupportedOp(
            f"Slabs on {mesh.grid.describe()} cannot be used within torch.autograd.forward_ad, "
            "whose tangents do not pass messages between ranks: torch.autograd.grad gives gradients"
        )
    if peek_interpreter_stack() is not None:
        raise UnsupportedOp(
            f"Slabs on {mesh.grid.describe()} cannot be used within torch.func.grad, vmap and the "
            "like, which messages between ranks do not pass: torch.autograd.grad gives gradients"
        )


def mean_of(x: Tensor, mesh: Mesh) -> Tensor:
    """``x``, whose gradient becomes the mean of those of all ranks.

    Of a DTensor this rank's part; ranks that hold other parts carry none of its gradient.
    """
    if mesh.num_ranks == 1:
        return x
    if x.layout != torch.strided:
        raise UnsupportedOp(
            f"a tensor of layout {x.layout} that wants a gradient cannot meet Slabs on "
            f"{mesh.grid.describe()}: its gradient would be one rank's part; detach it, or make "
            "it a parameter of the parallelized module"
        )
    out: Tensor = _LocalPart.apply(x) if isinstance(x, DTensor) else x.view_as(x)  # type: ignore[no-untyped-call]
    node: Any = out.grad_fn
    leaf = _Leaf(x, node.next_functions[0][0]) if x.is_leaf else None
    axes = axes_beside_cuts(x, mesh)
    num_cuts = mesh.num_ranks // math.prod(mesh.grid.size(axis) for axis in axes)
    is_fsdps = _is_gathered(x)

    def on_grad(grads: tuple[Tensor | None]) -> tuple[Tensor] | None:
        grad = grads[0]
        if grad is None:
            return None
        if is_fsdps:  # which takes the mean over the other axes
            return (_mean(grad, mesh, [axis for axis in axes if axis == "channel"]),)
        if leaf is not None and leaf.is_left_to_pass_end(grad, mesh):
            return None
        return (_mean(grad, mesh, axes),)

    node.register_prehook(on_grad)
    node.metadata[MEAN] = True
    out = part_of_cut(out, num_cuts)
    out._has_mean = True  # type: ignore[attr-defined]
    return out


class _LocalPart(Function):
    """This rank's part of a DTensor; unlike with ``to_local``, gradients have gradients."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = x.device_mesh, x.placements
        ctx.shape, ctx.stride = x.shape, x.stride()
        local: Tensor = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def leave_part(x: Tensor) -> None:
    """Has the gradient of ``x`` stay this rank's part of it: whoever gets it takes the mean."""
    x._has_mean = True  # type: ignore[attr-defined]


def _mean(grad: Tensor, mesh: Mesh, axes: Collection[str] = AXES) -> Tensor:
    num = math.prod(mesh.grid.size(axis) for axis in axes)
    part = grad.to(mesh.device) / num  # before the sum, as half overflows
    return reduce_sum(part, mesh, axes).to(grad.device)


class _Leaf:
    """A leaf that meets a Slab, with the node that adds to its gradient."""

    def __init__(self, leaf: Tensor, node: Any) -> None:
        self._leaf, self._node = leaf, node
        self._number = next(_numbers)

    def is_left_to_pass_end(self, grad: Tensor, mesh: Mesh) -> bool:
        """Whether its mean is taken by the end of the pass, as nobody sees ``grad`` before.

        Ranks that run the same graph with the same hooks find the same.
        """
        leaf = self._leaf
        if torch.is_grad_enabled() or leaf.device != mesh.device or grad.layout != torch.strided:
            return False
        if has_other_hooks(leaf) or _is_hooked(self._node) or not _is_accumulated(self._node):
            return False
        if gradient_hook_of(leaf) is None:
            Averaging.of_this_pass(mesh).at_end(leaf, self._number)
        return True


_numbers = itertools.count(1 << 32)
"""Of leaves in the last message of a pass: behind those of weights."""


def _is_accumulated(node: Any) -> bool:
    """Whether this pass adds to ``grad`` of the leaf that ``node`` belongs to."""
    try:
        return will_run_in_backward(node)
    except RuntimeError:  # as torch.autograd.grad runs, which returns it instead
        return False


def _is_hooked(node: Any) -> bool:
    """Whether ``node`` has hooks of its own; torch shows them only to who adds one."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_do_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _do_nothing(*grads: object) -> None: ...


def mean_in_graph(x: Tensor, mesh: Mesh, number: int | None) -> Tensor:
    """As ``mean_of``, where a compiler follows; ``number`` is that of a weight of a module."""
    return _MeanInGraph.apply(x, mesh, number) if mesh.num_ranks > 1 else x  # type: ignore[no-untyped-call]


class _MeanInGraph(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, number: int | None) -> Tensor:
        ctx.mesh, ctx.number = mesh, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.number is None:
            return _mean(grad, ctx.mesh), None, None
        spec = TensorSpec(grad.shape, grad.dtype, grad.device)
        run = partial(_mean_of_weight, number=ctx.number, mesh=ctx.mesh)
        return as_operator(run, [grad], [spec])[0], None, None


def _mean_of_weight(grads: list[Tensor], number: int, mesh: Mesh) -> list[Tensor]:
    """In a compiled backward pass: the mean of a weight's gradient, or for now the rank's part."""
    (grad,), weight = grads, weight_of_number(number)
    hook = None if weight is None else gradient_hook_of(weight)
    if weight is not None and hook is not None and (replica := hook.replica()):
        node = replica.nodes.get(number)
        if node is not None and _Leaf(weight, node).is_left_to_pass_end(grad, mesh):
            return [grad.clone()]
    return [_mean(grad, mesh)]


def _has_learnable(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Slab):
            continue
        if isinstance(value, (tuple, list)):
            if _has_learnable(value):
                return True
        elif _is_learnable(value):
            return True
    return False


def _is_learnable(x: Any) -> bool:
    """Whether ``x`` is a plain tensor whose gradient is a part of that of one process.

    FSDP2 takes the mean of what it put together. What a compiler follows has been looked at before.
    """
    if not isinstance(x, Tensor) or not x.requires_grad or hasattr(x, "_has_mean"):
        return False
    if isinstance(x, FakeTensor | FunctionalTensor | DTensor) or _is_gathered(x):
        return False
    if not x.is_leaf or (hook := gradient_hook_of(x)) is None:
        return True
    replica = hook.replica()
    return replica is None or replica.is_synced


def _is_gathered(x: Tensor) -> bool:
    """Whether FSDP2 put ``x`` together."""
    if not len(_sharded) or not x.is_leaf:
        return False
    if x not in _gathered:
        slots = (slot for each in _sharded.values() for slot in each)
        if not any(table.get(name) is x for table, name in slots):
            return False
        _gathered[x] = True
    return True
