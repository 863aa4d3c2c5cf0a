"""Forward passes of a module on one rank: without Slabs, where these change nothing.

The first pass on arguments of a kind runs on Slabs and is watched. If nothing in it needed them,
passes like it run on plain tensors from then on, and only their outputs become Slabs. Dispatching a
function of Slabs takes the host longer than launching a kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map

from hyperslab.comm.mesh import Mesh
from hyperslab.nn.depth_first.depth_first import DepthFirst
from hyperslab.nn.lone_dropout import Draws, Dropouts
from hyperslab.nn.op import has_users_rules
from hyperslab.nn.parts import Parts
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.nn.watched_slab import PLAIN, Recipe, Watch
from hyperslab.torch_private import is_traced

_log = logging.getLogger("hyperslab")

MOST_KEPT = 64
"""Kinds of passes that are known; of others the oldest are forgotten."""
MANY_NEW = 16
"""After as many passes of new kinds, one after the other, all that follow run on Slabs."""


class Lone:
    """The forward pass ``run`` of ``module`` on a mesh of one rank."""

    def __init__(
        self, module: nn.Module, run: Callable[..., Any], mesh: Mesh, chains: Sequence[DepthFirst]
    ) -> None:
        self._module, self._run, self._mesh, self._chains = module, run, mesh, chains
        self._known: dict[object, Recipe | None] = {}
        """What is known of passes, by their kind; None where they need Slabs."""
        self._num_new = 0
        """Passes of new kinds since the last of a known one."""
        self._is_off = False
        self._told: set[str] = set()
        self._look()

    def _look(self) -> None:
        self._known.clear()
        self._parts = Parts(self._module)
        self._dropouts = Dropouts(self._parts.modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_off or is_dynamo_compiling():
            return self._run(*args, **kwargs)
        kind = self._kind(args, kwargs)
        if kind is None:
            return self._run(*args, **kwargs)
        if kind not in self._known:
            return self._watched(kind, args, kwargs)
        self._num_new, recipe = 0, self._known[kind]
        return self._run(*args, **kwargs) if recipe is None else self._plain(recipe, args, kwargs)

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """What passes depend on besides values; None where this one is to run on Slabs."""
        settings = None if is_traced() else self._settings()
        if settings is None:
            return None
        leaves: Sequence[Any] = args
        spec = None
        if kwargs or any(type(arg) is not Slab for arg in args):
            leaves, spec = tree_flatten((args, kwargs), is_leaf=is_slab)
        kinds = tuple([_kind_of(leaf) for leaf in leaves])
        if None in kinds or not any(type(leaf) is Slab for leaf in leaves):
            self._tell("an argument is neither a tensor nor a number or a word")
            return None
        device = self._mesh.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return kinds, spec, settings, casts, grads

    def _settings(self) -> tuple[object, ...] | None:
        """What passes depend on besides arguments; None where they are to run on Slabs."""
        if not self._parts.are_there_still():
            self._look()
        settings = self._parts.settings()
        if settings is None:
            self._tell("a part of it has hooks, is compiled, or asks for types of tensors")
        elif any(chain.picked for chain in self._chains):
            self._tell("a part of it is computed depth first")
        elif has_users_rules():
            self._tell("there are rules of the user's")
        elif torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # Activation checkpointing around it compares what both its passes save.
            self._tell("what it saves for the backward pass is saved by hooks")
        else:
            return settings
        return None

    def _watched(self, kind: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, draws = Watch(), Draws(self._mesh.device)

        def shown(leaf: Any) -> Any:
            return watch.show(leaf) if is_slab(leaf) else leaf

        args, kwargs = tree_map(shown, (args, kwargs), is_leaf=is_slab)
        try:
            with self._dropouts.prepared(watch):
                out, recipe = watch.hide(self._run(*args, **kwargs))
        finally:
            del args, kwargs  # or they would be taken for Slabs that the module keeps
            watch.end()
        if not draws.are_all():
            watch.need("random numbers are drawn, by others than layers of dropout")
        self._note(kind, None if watch.why else recipe, watch.why)
        return out

    def _note(self, kind: object, recipe: Recipe | None, why: str) -> None:
        if len(self._known) == MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[kind] = recipe
        self._num_new += 1
        if self._num_new == MANY_NEW:
            self._is_off, why = True, f"the last {MANY_NEW} passes were all of other kinds"
        if why:
            self._tell(why)

    def _tell(self, why: str) -> None:
        """Why a pass runs on Slabs, once."""
        if why not in self._told:
            self._told.add(why)
            _log.debug("%s runs on Slabs: %s", type(self._module).__name__, why)

    def _plain(self, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass on plain tensors."""
        if kwargs or any(type(arg) is not Slab for arg in args):
            args, kwargs = tree_map(_local, (args, kwargs), is_leaf=is_slab)
        else:
            args = tuple([arg.local for arg in args])
        draws = Draws(self._mesh.device)
        try:
            with self._dropouts.prepared():
                out = self._run(*args, **kwargs)
        except Exception as error:
            self._is_off = True
            error.add_note("in a pass on plain tensors; from the next one on they run on Slabs")
            raise
        if not draws.are_all():
            self._is_off = True
            _log.warning(
                "%s drew random numbers that depend on the mesh in this forward pass, as it had "
                "not in passes like it; the next ones draw the same on any mesh",
                type(self._module).__name__,
            )
        return recipe.wrap(out, self._mesh)


def _kind_of(leaf: Any) -> object:
    """What passes depend on besides values; None where they may depend on more."""
    if type(leaf) is Slab:
        is_plain = type(leaf.local) in (Tensor, Parameter) and not any(leaf.layout.splits)
        return (leaf.layout, leaf.local.dtype, leaf.is_view, leaf.is_part) if is_plain else None
    if type(leaf) in (Tensor, Parameter):
        return leaf.shape, leaf.dtype
    return (type(leaf), leaf) if type(leaf) in PLAIN else None


def _local(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Slab) else leaf
