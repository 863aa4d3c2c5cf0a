"""The mode of torch functions in which a module runs on one rank, on plain tensors.

It looks functions up in ``SERVED``: where large tensors are cut into tiles, fused kernels are
faster, or numbers must be the same on any mesh, the function's rule computes it. All other
functions are torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.nn.deferred import Deferred, DeferredTensor, defer_tensor
from hyperslab.nn.dispatch import check_pieces, materialise, waiting
from hyperslab.nn.op import IMPLEMENTED, OPS, USERS, Function
from hyperslab.nn.single_rank.served import SERVED, pays
from hyperslab.nn.single_rank.wrapping import as_slab, unwrap, wrap
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import (
    active_function_modes,
    builtin_nn,
    num_function_modes,
    peek_interpreter_stack,
    pop_function_mode,
    push_function_mode,
    tree_leaves,
    tree_map,
    unpatched,
)


class Builtins(NamedTuple):
    """What an activation of ``torch.nn.functional`` calls, by whether it writes into its input."""

    new: Function
    in_place: Function


ACTIVATION_BUILTINS = {
    F.relu: Builtins(torch.relu, torch.relu_),
    F.leaky_relu: Builtins(builtin_nn.leaky_relu, builtin_nn.leaky_relu_),
}
"""Those that are served. A network has as many as convolutions: they are called by themselves."""


class SingleRankMode(TorchFunctionMode):
    """Within it, functions of plain tensors are computed as on Slabs, where that differs."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self._module, self._mesh = module, mesh
        self.is_paused = False

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
        is_users = (USERS or IMPLEMENTED) and (func in USERS or func in IMPLEMENTED)
        if needs is None and not is_users:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        if needs and not is_users and type(x) is Tensor:
            builtins = ACTIVATION_BUILTINS.get(func)
            if builtins is None:
                if not needs(x, args, kwargs):
                    return func(*args, **kwargs)
            elif kwargs.get("inplace"):
                del kwargs["inplace"]
                return builtins.in_place(*args, *kwargs.values())
            elif not pays(x):
                kwargs.pop("inplace", None)
                return builtins.new(*args, *kwargs.values())
        return self._serve(func, x, args, kwargs)

    def _serve(
        self, function: Function, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if peek_interpreter_stack() is not None:
            return function(*args, **kwargs)
        if function in USERS:
            return self._by_users_rule(function, args, kwargs)
        if not isinstance(x, Tensor):
            return function(*args, **kwargs)
        return self._by_rule(function, x, args, kwargs)

    def serves(self) -> bool:
        """Whether functions of plain tensors may be computed in other ways than by torch."""
        return not self.is_paused and peek_interpreter_stack() is None

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

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, Parameter) or id(leaf) in buffers:
                return leaf
            return as_slab(leaf, self._mesh)

        given, named = tree_map(wrapped, (args, kwargs), is_leaf=is_slab)
        if not any(map(is_slab, tree_leaves((given, named), is_leaf=is_slab))):
            return function(*args, **kwargs)
        op = OPS[function]
        out = op.rule(*given, **op.keywords(named))
        check_pieces(function, out)
        return self._unwrapped(out)

    def on_slabs(self, run: Function) -> Function:
        """``run``, which is given Slabs in the place of tensors; its result is plain."""

        def on_slabs(*args: Any, **kwargs: Any) -> Any:
            materialise(run, ())
            args, kwargs = wrap((args, kwargs), self._mesh, {})
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
        if not kwargs and len(args) == 1 and type(args[0]) is Slab:  # as most are
            (slab,) = args
            args = (slab.local,)
            given[id(slab.local)] = slab
        else:  # in ten times the time
            args, kwargs = unwrap((args, kwargs), given)
        if num_function_modes() and active_mode() is not None:
            out = self._run(*args, **kwargs)  # of a module that this one is part of
        else:
            push_function_mode(SingleRankMode(self._module, self._mesh))
            try:
                out = self._run(*args, **kwargs)
                if waiting.calls:
                    materialise(self._run, ())
            finally:
                pop_function_mode()
        return wrap(out, self._mesh, given) if given else out


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
