"""Sharded tensors, put together in host memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hyperslab.comm.failure import contact
from hyperslab.comm.mesh import Mesh

Piece = tuple[tuple[int, ...], Tensor]
"""Where it begins, and its values."""


def gather_whole(tensor: Tensor, mesh: Mesh) -> Tensor | None:
    """The whole of ``tensor``, which may be a DTensor, in host memory on rank 0; None elsewhere.

    Unlike ``DTensor.full_tensor`` it needs room on one rank only, and not on its GPU; nor does it
    crash where ranks share a GPU, as that does with gloo (torch 2.11).

    Collective over all ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if mesh.rank == 0 else None
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    mine: Piece = (tuple(offset), tensor.to_local().detach().to("cpu", copy=True))
    pieces: list[Piece] | None = [mine] * mesh.num_ranks if mesh.rank == 0 else None
    if mesh.num_ranks > 1:
        with contact("gathering weights", mesh):
            dist.gather_object(mine, pieces, dst=0, group=mesh.group)
    if pieces is None:
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for start, values in pieces:
        whole[tuple(map(slice, start, map(sum, zip(start, values.shape, strict=True))))] = values
    return whole
