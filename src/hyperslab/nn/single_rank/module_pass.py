"""A pass of a module on one rank."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from hyperslab.comm.mesh import Mesh
from hyperslab.nn.dispatch import materialise, waiting
from hyperslab.nn.op import Function
from hyperslab.nn.single_rank.mode import SingleRankMode, active_mode
from hyperslab.nn.single_rank.wrapping import unwrap, wrap
from hyperslab.nn.slab import Slab


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
        if kwargs or any(type(arg) is not Slab for arg in args):
            args, kwargs = unwrap((args, kwargs), given)
        else:  # as most are, in a tenth of the time
            given = {id(arg.local): arg for arg in args}
            args = tuple([arg.local for arg in args])
        if active_mode() is not None:  # of a module that this one is part of
            out = self._run(*args, **kwargs)
        else:
            with SingleRankMode(self._module, self._mesh):
                out = self._run(*args, **kwargs)
                if waiting.calls:
                    materialise(self._run, ())
        return wrap(out, self._mesh, given) if given else out
