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
from hyperslab.torch_private import num_function_modes, pop_function_mode, push_function_mode


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
