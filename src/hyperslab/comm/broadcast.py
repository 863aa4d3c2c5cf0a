"""What rank 0 has, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.failure import contact
from hyperslab.comm.mesh import Mesh

BATCH_NBYTES = 1 << 26
"""Small tensors travel together up to this size."""


def broadcast_(tensors: Iterable[Tensor], mesh: Mesh, doing: str) -> None:
    """Overwrites ``tensors`` with those of rank 0; shapes and dtypes are the same on every rank.

    Collective over all ranks. Not differentiable, and unseen by autograd: a graph that holds one of
    the tensors stays valid.
    """
    if mesh.num_ranks == 1:
        return
    for batch in _batches(tensors):
        flat = torch.cat([_raw(x) for x in batch])
        with contact(doing, mesh):
            dist.broadcast(flat, 0, group=mesh.group)
        if mesh.rank:
            for x, raw in zip(batch, flat.split([x.nbytes for x in batch]), strict=True):
                x.data.copy_(raw.clone().view(x.dtype).view(x.shape))


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    nbytes = 0
    for x in tensors:
        if not x.numel():
            continue
        if batch and nbytes + x.nbytes > BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(x)
        nbytes += x.nbytes
    if batch:
        yield batch


def _raw(x: Tensor) -> Tensor:
    """``x`` as bytes: gloo does not know every dtype."""
    return x.detach().contiguous().view(-1).view(torch.uint8)
