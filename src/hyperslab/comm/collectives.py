"""Collectives outside of autograd: from rank 0, to rank 0, and minima over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperslab.comm.failure_report import contact
from hyperslab.comm.mesh import Mesh
from hyperslab.torch_private import offset_of_shard

BATCH_NBYTES = 1 << 26
"""Small tensors travel together up to this size."""


def broadcast_(tensors: Iterable[Tensor], mesh: Mesh, doing: str) -> None:
    """Overwrites ``tensors`` with those of rank 0; shapes and dtypes are the same on every rank.

    DTensors on an axis of the mesh become those of the first ranks that hold the same part.

    Collective over all ranks. Not differentiable, and unseen by autograd: a graph that holds one of
    the tensors stays valid.
    """
    if mesh.num_ranks == 1:
        return
    alike: dict[tuple[str, ...], list[Tensor]] = {(): []}
    for x in tensors:
        cut = (x.device_mesh.mesh_dim_names or ()) if isinstance(x, DTensor) else ()
        alike.setdefault(cut, []).append(x.to_local() if isinstance(x, DTensor) else x)
    for cut, parts in alike.items():
        axes = mesh.axes_beside(cut)
        if not axes:
            continue
        is_first = not any(mesh.coords[axis] for axis in axes)
        group = mesh.group_over(axes) if cut else mesh.group
        for batch in _batches(parts):
            flat = torch.cat([_raw(x) for x in batch])
            with contact(doing, mesh):
                dist.broadcast(flat, group=group, group_src=0)
            if not is_first:
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


def reduce_min(doing: str, numbers: Sequence[int], mesh: Mesh) -> list[int]:
    """The minimum over all ranks of each of the ``numbers``.

    Collective over all ranks. ``doing`` says in an error what for.
    """
    if mesh.num_ranks == 1:
        return list(numbers)
    least = torch.tensor(numbers)
    with contact(doing, mesh):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.group)
    return least.tolist()


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
    mine: Piece = (offset_of_shard(tensor), tensor.to_local().detach().to("cpu", copy=True))
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
