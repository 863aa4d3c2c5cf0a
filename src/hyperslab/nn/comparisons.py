"""Whether all ranks ran the same operators in a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hyperslab.comm.agree import Comparison, post_comparison
from hyperslab.comm.journal import Entry
from hyperslab.comm.mesh import Mesh


@dataclass
class Comparisons:
    """The comparisons of a module's forward passes.

    They travel while the backward pass runs and are settled at its end, or by the next forward
    pass; at once where there will be no backward pass.
    """

    mesh: Mesh
    _pending: list[Comparison] = field(default_factory=list)

    def post(self, entries: list[Entry]) -> None:
        """Begins to compare ``entries``. Collective over all ranks.

        One rank may run a module by itself on a plain tensor: nothing is compared then.
        """
        if self.mesh.num_ranks == 1 or not entries:
            return
        self.settle()
        self._pending.append(post_comparison(entries, self.mesh))
        if not torch.is_grad_enabled():
            self.settle()

    def settle(self) -> None:
        """Raises if ranks ran different operators. Collective over all ranks."""
        while self._pending:
            self._pending.pop().settle()
