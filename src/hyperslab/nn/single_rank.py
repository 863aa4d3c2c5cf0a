"""A module on one rank: plain tensors, with our implementations in the place of some functions.

A mode of torch functions is active while the module runs. It looks functions up in ``SERVED``:
where large tensors are cut into tiles, fused kernels are faster, or numbers must be the same on any
mesh, the function's rule computes it. All other functions are torch's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.kernels import fused, tiles
from hyperslab.kernels.torch_conv import avoids_any
from hyperslab.layout import Layout
from hyperslab.nn.deferred import Deferred, DeferredTensor, defer_tensor
from hyperslab.nn.dispatch import materialise, waiting
from hyperslab.nn.op import OPS, USERS, Function
from hyperslab.nn.outputs import fields_of, is_record, replaced
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import (
    active_function_modes,
    peek_interpreter_stack,
    tree_map,
    unpatched,
)

Needs = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], bool]
"""Whether a rule has something to offer for a function's input and all its arguments."""

MAX_GROWTH = 1 << 5
"""How many times larger than their input outputs are taken to be at most, for each filter."""

MANY_CHANNELS = 32
"""Convolutions from more channels to more filters have no fused kernels."""


class SingleRank:
    """The forward pass ``run`` of ``module`` on a mesh of one rank: plain tensors inside.

    Slabs that it is given are unwrapped, and then the tensors it returns are wrapped.
    """

    def __init__(self, module: nn.Module, run: Function, mesh: Mesh) -> None:
        self._module, self._run, self._mesh = module, run, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._run(*args, **kwargs)
        given: dict[int, Slab] = {}
        args, kwargs = _unwrap((args, kwargs), given)
        if active_mode() is not None:  # of a module that this one is part of
            out = self._run(*args, **kwargs)
        else:
            with SingleRankMode(self._module, self._mesh):
                out = self._run(*args, **kwargs)
                materialise(self._run, ())
        return _wrap(out, self._mesh, given) if given else out


def _unwrap(tree: Any, given: dict[int, Slab]) -> Any:
    """``tree`` with plain tensors for its Slabs, which are noted in ``given`` by the tensors."""

    def unwrap(leaf: Any) -> Any:
        if isinstance(leaf, Slab):
            given[id(leaf.local)] = leaf
            return leaf.local
        return _with_fields(leaf, lambda value: _unwrap(value, given)) if is_record(leaf) else leaf

    return tree_map(unwrap, tree, is_leaf=is_record)


def _wrap(tree: Any, mesh: Mesh, given: dict[int, Slab]) -> Any:
    """``tree`` with Slabs for its tensors, but not for weights and single numbers."""

    def wrap(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and not isinstance(leaf, Parameter):
            return given[id(leaf)] if id(leaf) in given else as_slab(leaf, mesh)
        if is_record(leaf) and not isinstance(leaf, Slab):
            return _with_fields(leaf, lambda value: _wrap(value, mesh, given))
        return leaf

    return tree_map(wrap, tree, is_leaf=is_record)


def _with_fields(record: Any, function: Callable[[Any], Any]) -> Any:
    """``record`` with ``function`` of each of its fields; itself, if that changes none."""
    fields = fields_of(record)
    new = {name: function(value) for name, value in fields.items()}
    return record if all(new[name] is fields[name] for name in fields) else replaced(record, new)


def as_slab(x: Tensor, mesh: Mesh) -> Slab:
    """The Slab of a tensor on one rank."""
    return Slab(x, Layout.unsplit(x.shape), mesh, x._base is not None)


class SingleRankMode(TorchFunctionMode):
    """Within it, functions of plain tensors are computed as on Slabs, where that differs."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self._module, self._mesh = module, mesh
        self.is_paused = False
        self._made: dict[int, weakref.ref[Tensor]] = {}
        """Tensors that are plain on several ranks too, as they are made of nothing."""

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if waiting.calls:
            materialise(func, args)
        needs = SERVED.get(func)
        if needs is None and func not in USERS:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._serve(func, needs, args, kwargs or {})

    def _serve(
        self, function: Function, needs: Needs | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if peek_interpreter_stack() is not None:
            return function(*args, **kwargs)
        if function in USERS:
            return self._by_users_rule(function, args, kwargs)
        if needs is _makes_plain:
            return self._note(function(*args, **kwargs), args)
        x = args[0] if args else kwargs.get("input")
        is_deferred = type(x) is DeferredTensor
        if not isinstance(x, Tensor) or isinstance(x, Parameter) or self._is_made(x):
            return function(*args, **kwargs)
        if is_deferred or needs(x, args, kwargs):  # type: ignore[misc]
            return self._by_rule(function, x, args, kwargs)
        return function(*args, **kwargs)

    def _by_rule(
        self, function: Function, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        slab, op = _slab_of(x, self._mesh), OPS[function]
        try:
            out = op.rule(*_swapped(args, x, slab), **op.keywords(_swapped(kwargs, x, slab)))
        except UnsupportedOp:  # of what would depend on the mesh
            return function(*args, **kwargs)
        return x if out is slab else self._unwrapped(out)

    def _by_users_rule(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a rule of the user's makes of Slabs in the place of all tensors but weights."""
        materialise(function, ())
        buffers = set(map(id, self._module.buffers()))

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, Parameter) or id(leaf) in buffers:
                return leaf
            return as_slab(leaf, self._mesh)

        args, kwargs = tree_map(wrap, (args, kwargs), is_leaf=is_slab)
        op = OPS[function]
        return self._unwrapped(op.rule(*args, **op.keywords(kwargs)))

    def on_slabs(self, run: Function) -> Function:
        """``run``, which is given Slabs in the place of tensors; its result is plain."""

        def on_slabs(*args: Any, **kwargs: Any) -> Any:
            materialise(run, ())
            args, kwargs = _wrap((args, kwargs), self._mesh, {})
            with self.paused():
                return self._unwrapped(run(*args, **kwargs))

        return on_slabs

    def apply(self, run: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run``, the ``apply`` of an autograd Function, gives.

        Within it functions are torch's own, as they are when its backward pass computes some again.
        But a reentrant checkpoint computes all again, and can do it in the same way.
        """
        materialise(run, ())
        if run in USERS:
            return self._by_users_rule(run, args, kwargs)
        if run == unpatched(CheckpointFunction.apply):
            return run(self.again(args[0]), *args[1:], **kwargs)
        with self.paused():
            return run(*args, **kwargs)

    def _unwrapped(self, out: Any) -> Any:
        if isinstance(out, Slab):
            return _plain(out)
        return tree_map(_plain, out, is_leaf=is_slab)

    def _note(self, made: Any, args: tuple[Any, ...]) -> Any:
        """``made``, which was made of nothing, unless it is to be like its first argument."""
        like = args[0] if args and isinstance(args[0], Tensor) else None
        if like is None or like.shape != made.shape:
            self._made[id(made)] = weakref.ref(made)
        return made

    def _is_made(self, x: Tensor) -> bool:
        found = self._made.get(id(x)) if self._made else None
        return found is not None and found() is x

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, functions are torch's own."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def again(self, function: Function) -> Function:
        """``function``, which runs in such a mode whenever it is called, as in a backward pass."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if active_mode() is not None:
                return function(*args, **kwargs)
            with SingleRankMode(self._module, self._mesh):
                out = function(*args, **kwargs)
                materialise(function, ())
                return out

        return run


def active_mode() -> SingleRankMode | None:
    """The mode in which this thread runs, if it does."""
    for mode in active_function_modes():
        if isinstance(mode, SingleRankMode) and not mode.is_paused:
            return mode
    return None


def _slab_of(x: Tensor, mesh: Mesh) -> Slab:
    """The Slab that ``x`` stands for, if it is deferred still, else a new one."""
    if isinstance(x, DeferredTensor) and x.slab.source is not None and x.elements is None:
        return x.slab
    return as_slab(x, mesh)


def _swapped(tree: Any, x: Tensor, slab: Slab) -> Any:
    if isinstance(tree, dict):
        return {name: slab if leaf is x else leaf for name, leaf in tree.items()}
    return tuple([slab if leaf is x else leaf for leaf in tree])


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, Slab):
        return leaf
    return defer_tensor(leaf) if isinstance(leaf, Deferred) and leaf.source else leaf.local


def _is_large(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return x.numel() * MAX_GROWTH > tiles.MAX_NUMEL


def _is_large_or_fused(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _is_large(x, args, kwargs) or fused.pays(x)


def _may_wait(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not kwargs.get("inplace") and fused.pays(x)


def _conv_needs(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, Tensor) or weight.ndim < 2 or 0 in weight.shape or avoids_any():
        return True
    filters, channels = weight.shape[:2]
    if x.numel() * max(1, filters / channels) * MAX_GROWTH > tiles.MAX_NUMEL:
        return True
    return min(filters, channels) <= MANY_CHANNELS and fused.pays(x)


def _draws(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _drops(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    is_training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(is_training)


def _makes_plain(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


def _named(spaces: tuple[Any, ...], *names: str) -> list[Function]:
    return [getattr(space, name) for space in spaces for name in names if hasattr(space, name)]


def _per_dim(spaces: tuple[Any, ...], *names: str) -> list[Function]:
    return _named(spaces, *(name.format(n) for name in names for n in (1, 2, 3)))


_BOTH = (F, torch)
SERVED: dict[Function, Needs] = {
    **dict.fromkeys(_per_dim(_BOTH, "conv{}d", "conv_transpose{}d"), _conv_needs),
    **dict.fromkeys(
        _per_dim(_BOTH, "avg_pool{}d", "max_pool{}d", "max_pool{}d_with_indices", "lp_pool{}d"),
        _is_large_or_fused,
    ),
    **dict.fromkeys(_per_dim(_BOTH, "adaptive_avg_pool{}d", "adaptive_max_pool{}d"), _is_large),
    **dict.fromkeys(
        _named(_BOTH, "batch_norm", "group_norm", "instance_norm", "layer_norm", "interpolate"),
        _is_large,
    ),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, F.leaky_relu), _may_wait),
    **dict.fromkeys(
        _named(_BOTH, "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _drops
    ),
    **dict.fromkeys(_named(_BOTH, "alpha_dropout", "feature_alpha_dropout"), _drops),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.bernoulli), _draws),
    **dict.fromkeys(_named((Tensor,), "bernoulli_", "normal_", "uniform_", "exponential_"), _draws),
    F.gumbel_softmax: _draws,
    **dict.fromkeys(_named((torch,), "empty", "zeros", "ones", "full"), _makes_plain),
    **dict.fromkeys(
        _named((Tensor,), "new_empty", "new_zeros", "new_ones", "new_full"), _makes_plain
    ),
}
"""The functions that rules may compute, each with what tells whether they are to."""
