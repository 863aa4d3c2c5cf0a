"""Ranks that must agree, or stop together."""

from __future__ import annotations

from hashlib import blake2b
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.failure import lost_contact
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError


def agree(error: Exception | None, mesh: Mesh) -> None:
    """Raises on every rank if any rank brings an error, naming the first such rank.

    Collective over all ranks.
    """
    if mesh.num_ranks == 1:
        if error:
            raise error
        return
    first = torch.tensor([mesh.rank if error else mesh.num_ranks])
    _all_reduce(first, dist.ReduceOp.MIN, "checking that all ranks are well", mesh)
    if (rank := int(first)) < mesh.num_ranks:
        _raise_together(error, rank, mesh)


def _raise_together(error: Exception | None, rank: int, mesh: Mesh) -> NoReturn:
    words = [f"{type(error).__name__}: {error}" if error else ""]
    dist.broadcast_object_list(words, src=rank, group=mesh.group, device=torch.device("cpu"))
    if error and rank == mesh.rank:
        raise error
    raise CommError(f"rank {rank} stopped, and so do all: {words[0]}") from error


def agree_on(what: str, value: object, mesh: Mesh) -> None:
    """Raises on every rank unless all bring the same ``value`` (compared by its ``repr``).

    Collective over all ranks. Eight bytes travel; the values themselves only when they differ.
    """
    if mesh.num_ranks == 1:
        return
    mine = int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest())
    ends = torch.tensor([mine, -mine])
    _all_reduce(ends, dist.ReduceOp.MAX, f"comparing {what}", mesh)
    if int(ends[0]) == -int(ends[1]):
        return
    values: list[object] = [None] * mesh.num_ranks
    dist.all_gather_object(values, repr(value), group=mesh.group)
    other = next(rank for rank, theirs in enumerate(values) if theirs != values[0])
    raise CommError(
        f"ranks differ in {what}: rank 0 has {values[0]}, rank {other} has {values[other]}; "
        "every rank must make the same call with the same global shape"
    )


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, doing: str, mesh: Mesh) -> None:
    try:
        dist.all_reduce(x, op, group=mesh.group)
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
