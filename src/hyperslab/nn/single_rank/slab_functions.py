"""Functions of Slabs on one rank, as in losses: torch's own, of the tensors inside."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from hyperslab.kernels import fused
from hyperslab.layout import Layout
from hyperslab.nn.deferred import ACTIVATIONS
from hyperslab.nn.dispatch import on_single_rank
from hyperslab.nn.op import IMPLEMENTED, Op
from hyperslab.nn.single_rank.served import SERVED
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import tree_map

_FAMILIES = {"pointwise", "windowed", "reducing", "product"}
"""Those whose results are new tensors, or the tensor that was written into."""


@on_single_rank
def run_as_torch(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch makes of the tensors in ``args``, with Slabs for tensors.

    ``NotImplemented`` where a rule has something to offer, where the mesh has several ranks, or
    where torch refuses: a rule says in its own words why, or does what torch cannot.
    """
    if args and type(args[0]) is Slab and args[0].mesh.backend is not None:
        return NotImplemented
    function = op.function
    if op.family not in _FAMILIES or function in IMPLEMENTED:
        return NotImplemented
    slabs: list[Slab] = []
    plain: list[Any] = []
    for arg in args:
        if isinstance(arg, Slab):
            if type(arg) is not Slab or arg.mesh.backend is not None:
                return NotImplemented
            slabs.append(arg)
            plain.append(arg.local)
        else:
            plain.append(arg)
    named = kwargs
    for name, arg in kwargs.items():
        if isinstance(arg, Slab):
            if type(arg) is not Slab or arg.mesh.backend is not None:
                return NotImplemented
            slabs.append(arg)
            named = {**named, name: arg.local}
    if not slabs:
        return NotImplemented
    x = plain[0] if plain else named.get("input")
    needs = SERVED.get(function)
    if needs is not None and (not isinstance(x, Tensor) or needs(x, tuple(plain), named)):
        return NotImplemented
    if function in ACTIVATIONS and isinstance(x, Tensor) and fused.pays(x):  # also in place
        return NotImplemented
    try:
        out = function(*plain, **named)
    except (RuntimeError, TypeError, ValueError):
        return NotImplemented
    if isinstance(out, Tensor):
        return _with_slab(out, slabs, args)
    return (
        out if out is NotImplemented else tree_map(partial(_with_slab, slabs=slabs, args=args), out)
    )


def _with_slab(leaf: Any, slabs: list[Slab], args: tuple[Any, ...]) -> Any:
    """A Slab for a tensor, but not for a number, or for what was plain and written into."""
    if not isinstance(leaf, Tensor):
        return leaf
    for slab in slabs:
        if slab.local is leaf:
            return slab
    for arg in args:
        if arg is leaf:
            return arg
    return slabs[0].with_local(leaf, Layout.unsplit(leaf.shape)) if leaf.ndim else leaf
