"""Functions of Slabs on one rank, as in losses: torch's own, of the tensors inside."""

from __future__ import annotations

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
    if op.family not in _FAMILIES or op.function in IMPLEMENTED:
        return NotImplemented
    slabs = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Slab)]
    for slab in slabs:
        if type(slab) is not Slab or slab.mesh.backend is not None:
            return NotImplemented
    if not slabs:
        return NotImplemented
    plain = tuple([arg.local if isinstance(arg, Slab) else arg for arg in args])
    named = {name: arg.local if isinstance(arg, Slab) else arg for name, arg in kwargs.items()}
    x = plain[0] if plain else named.get("input")
    needs = SERVED.get(op.function)
    if needs is not None and (not isinstance(x, Tensor) or needs(x, plain, named)):
        return NotImplemented
    if op.function in ACTIVATIONS and isinstance(x, Tensor) and fused.pays(x):  # also in place
        return NotImplemented
    try:
        out = op.function(*plain, **named)
    except (RuntimeError, TypeError, ValueError):
        return NotImplemented
    return _with_slabs(out, slabs, args)


def _with_slabs(out: Any, slabs: list[Slab], args: tuple[Any, ...]) -> Any:
    """``out`` with Slabs for its tensors, not for numbers or what was plain and written into."""
    if out is NotImplemented:
        return out

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for arg in (*slabs, *args):
            if arg is leaf or (isinstance(arg, Slab) and arg.local is leaf):
                return arg
        return slabs[0].with_local(leaf, Layout.unsplit(leaf.shape)) if leaf.ndim else leaf

    return wrapped(out) if isinstance(out, Tensor) else tree_map(wrapped, out)
