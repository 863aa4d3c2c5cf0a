"""The least of all ranks' numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hyperslab.comm.failure import contact
from hyperslab.comm.mesh import Mesh


def reduce_least(doing: str, numbers: Sequence[int], mesh: Mesh) -> list[int]:
    """The least that any rank brings of each of the ``numbers``.

    Collective over all ranks. ``doing`` says in an error what for.
    """
    if mesh.num_ranks == 1:
        return list(numbers)
    least = torch.tensor(numbers)
    with contact(doing, mesh):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.group)
    return least.tolist()
