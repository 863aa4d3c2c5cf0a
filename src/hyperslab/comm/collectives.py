"""Collectives outside of autograd: from rank 0, to rank 0, and minima over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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


Piece = tuple[str, tuple[int, ...], Tensor]
"""The name of a tensor, where the piece begins in it, and its values in host memory."""


def gather_pieces(tensors: Mapping[str, Tensor], mesh: Mesh) -> Iterator[Piece]:
    """All of ``tensors``, which may be DTensors, on rank 0; on other ranks nothing.

    A piece has about ``BATCH_NBYTES`` at most, so that no rank needs room for a whole tensor. Plain
    tensors are those of rank 0.

    Collective over all ranks, each of which must go to the end.
    """
    cut = {name: each for name, each in tensors.items() if isinstance(each, DTensor)}
    mine = {
        name: (offset_of_shard(each), tuple(each.to_local().shape)) for name, each in cut.items()
    }
    held: list[Any] = [mine] * mesh.num_ranks
    if mesh.num_ranks > 1:
        with contact("gathering weights", mesh):
            dist.all_gather_object(held, mine, group=mesh.group)
    for name, tensor in tensors.items():
        if name not in cut:
            if mesh.rank == 0:
                yield from _rows(name, (0,) * tensor.ndim, tensor)
            continue
        boxes = [theirs[name] for theirs in held]
        for rank, (start, shape) in enumerate(boxes):
            if math.prod(shape) and (start, shape) not in boxes[:rank]:
                yield from _from_rank(rank, name, start, shape, tensor, mesh)


def _from_rank(
    rank: int, name: str, start: tuple[int, ...], shape: tuple[int, ...], tensor: Tensor, mesh: Mesh
) -> Iterator[Piece]:
    """What ``rank`` holds, for rank 0."""
    if mesh.rank not in (0, rank):
        return
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if rank == 0:
        yield from _rows(name, start, local)
    elif mesh.rank == rank:
        for _, _, values in _rows(name, start, local):
            with contact("gathering weights", mesh):
                dist.send(_raw(values), group=mesh.group, group_dst=0)
    else:
        expected = torch.empty(shape, dtype=tensor.dtype, device="meta")
        for _, begin, like in _rows(name, start, expected):
            raw = torch.empty(like.nbytes, dtype=torch.uint8)
            with contact("gathering weights", mesh):
                dist.recv(raw, group=mesh.group, group_src=rank)
            yield name, begin, raw.view(like.dtype).view(like.shape)


def _rows(name: str, start: tuple[int, ...], piece: Tensor) -> Iterator[Piece]:
    """``piece`` in batches of rows, in host memory unless it has no values."""
    if not piece.ndim:
        yield name, start, piece.detach().cpu()
        return
    step = max(1, BATCH_NBYTES * len(piece) // max(1, piece.nbytes))
    for first in range(0, len(piece), step):
        rows = piece[first : first + step].detach()
        yield name, (start[0] + first, *start[1:]), rows if rows.is_meta else rows.cpu()
