"""A word of warning where modules have full backward hooks."""

from __future__ import annotations

import warnings

from torch import nn
from torch.utils._pytree import tree_leaves

from hyperslab.comm.mesh import Mesh
from hyperslab.nn.slab import is_slab


class BackwardHooks:
    """Those of ``module`` and its parts, registered now or at any time before a pass."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._hooks = [
            (name, part.__dict__[kind])
            for name, part in module.named_modules()
            for kind in ("_backward_hooks", "_backward_pre_hooks")
            if mesh.rank == 0 and part.__dict__.get(kind) is not None
        ]
        self._tables = [table for _, table in self._hooks]

    def warn(self, given: object = None) -> None:
        """Warns, once and on rank 0, if there are any and there is a Slab in what a pass is given.

        Without ``given``, of passes to come.
        """
        if not any(self._tables):
            return
        if given is not None and not any(map(is_slab, tree_leaves(given, is_leaf=is_slab))):
            return
        hooked = dict.fromkeys(name or "the module itself" for name, table in self._hooks if table)
        self._hooks, self._tables = [], []
        warnings.warn(
            f"full backward hooks do not fire on Slabs: those of {', '.join(hooked)} will not; "
            "hook the tensors themselves, x.local.register_hook, in a forward hook",
            stacklevel=3,
        )
