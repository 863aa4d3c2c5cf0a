"""Whether all ranks ran the same operators in a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hyperslab.comm.agree import Comparison, post_comparison
from hyperslab.comm.journal import journal
from hyperslab.comm.mesh import Mesh


@dataclass
class Comparisons:
    """The comparisons of a module's forward passes.

    They travel while the backward pass runs and are settled at its end, or by the next forward
    pass; at once where there will be no backward pass.
    """

    mesh: Mesh
    _pending: list[Comparison] = field(default_factory=list)
    _begun: int = 0
    """How many operators had been run when a forward pass began."""
    _compared: int | None = None
    """How many have been compared."""

    def begin(self) -> None:
        """Says that a forward pass begins."""
        self._begun = journal.count

    @property
    def is_on_slabs(self) -> bool:
        """Whether the forward pass that began last has run operators on Slabs."""
        return journal.count != self._begun

    def post(self) -> None:
        """Begins to compare what was run since the last comparison, losses included.

        Collective over all ranks. One rank may run a module by itself on a plain tensor: nothing
        is compared then.
        """
        if self.mesh.num_ranks == 1 or not self.is_on_slabs:
            return
        entries = journal.since(self._begun if self._compared is None else self._compared)
        self._compared = journal.count
        self.settle()
        self._pending.append(post_comparison(entries, self.mesh))
        if not torch.is_grad_enabled():
            self.settle()

    def settle(self) -> None:
        """Raises if ranks ran different operators. Collective over all ranks."""
        while self._pending:
            self._pending.pop().settle()
