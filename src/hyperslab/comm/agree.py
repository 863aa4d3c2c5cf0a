"""Ranks that must agree, or stop together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hyperslab.comm.failure_report import contact
from hyperslab.comm.journal import Entry, digest, first_difference
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError, HyperslabError
from hyperslab.torch_private import is_traced, untraced

Result = TypeVar("Result")

_DIGEST = -1
"""The tag of digests; others are not negative."""
LONG = 400
"""Values with a longer ``repr`` are shown from shortly before the place where they differ."""


def agree(error: Exception | None, mesh: Mesh) -> None:
    """Raises on every rank if any rank brings an error, naming the first such rank.

    Collective over all ranks.
    """
    if mesh.num_ranks == 1 or is_traced():  # a compiler runs it now, and none of it later
        if error:
            raise error
        return
    first = torch.tensor([mesh.rank if error else mesh.num_ranks])
    with contact("checking that all ranks are well", mesh):
        dist.all_reduce(first, dist.ReduceOp.MIN, group=mesh.group)
    if (rank := int(first)) < mesh.num_ranks:
        _raise_together(error, rank, mesh)


def run_together(call: Callable[[], Result], mesh: Mesh) -> Result:
    """What ``call`` returns; where it raises on one rank, because of values, all of them stop.

    Collective over all ranks on CPUs. On a GPU values are looked at later, if at all.
    """
    if mesh.device.type != "cpu":
        return call()
    return _run(call, (IndexError, RuntimeError, ValueError), mesh)


def run_on_all(call: Callable[[], Result], mesh: Mesh) -> Result:
    """What ``call`` returns; where it raises on purpose on one rank, all of them stop.

    Collective over all ranks. The error has its own type on the ranks that bring it.
    """
    return _run(call, (HyperslabError,), mesh)


def _run(call: Callable[[], Result], errors: tuple[type[Exception], ...], mesh: Mesh) -> Result:
    result, error = None, None
    try:
        result = call()
    except errors as raised:
        error = raised
    agree(error, mesh)
    return cast(Result, result)


def _raise_together(error: Exception | None, rank: int, mesh: Mesh) -> NoReturn:
    reason = [f"{type(error).__name__}: {error}" if error else ""]
    with contact(f"hearing why rank {rank} stopped", mesh):
        dist.broadcast_object_list(reason, src=rank, group=mesh.group, device=torch.device("cpu"))
    if error and rank == mesh.rank:
        raise error
    raise CommError(f"rank {rank} stopped, and so do all: {reason[0]}") from error


def agree_on(what: str, value: object, mesh: Mesh) -> None:
    """Raises on every rank unless all bring the same ``value`` (compared by its ``repr``).

    Collective over all ranks. Sixteen bytes travel; the values themselves only when they differ.
    """
    if mesh.num_ranks == 1:
        return
    mine = int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest())
    ends = torch.tensor([mine, -mine])
    with contact(f"comparing {what}", mesh):
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.group)
        if int(ends[0]) == -int(ends[1]):
            return
        values = [""] * mesh.num_ranks
        dist.all_gather_object(values, repr(value), group=mesh.group)
    other = next(rank for rank, theirs in enumerate(values) if theirs != values[0])
    first, second = _cut_to_difference(values[0], values[other])
    raise CommError(
        f"ranks differ in {what}: rank 0 has {first}, rank {other} has {second}; every rank must "
        "make the same call with the same global values"
    )


def agree_about(what: str, values: Tensor, mesh: Mesh, advice: str) -> None:
    """Raises on every rank unless all bring about the same ``values``: rounding may differ.

    Collective over all ranks.
    """
    if mesh.num_ranks == 1:
        return
    mine = values.detach().to("cpu", torch.float64).nan_to_num()
    ends = torch.cat([mine, -mine])
    with contact(f"comparing {what}", mesh):
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.group)
        high, low = ends[: len(mine)], -ends[len(mine) :]
        if bool((high - low <= 1e-3 * torch.maximum(high.abs(), low.abs())).all()):
            return
        all_values = [torch.empty_like(mine) for _ in range(mesh.num_ranks)]
        dist.all_gather(all_values, mine, group=mesh.group)
    other = max(
        range(mesh.num_ranks), key=lambda rank: float((all_values[rank] - all_values[0]).norm())
    )
    place = int((all_values[other] - all_values[0]).abs().argmax())
    raise CommError(
        f"ranks differ in {what}: where rank 0 has {all_values[0][place]:.6g}, rank {other} has "
        f"{all_values[other][place]:.6g}; {advice}"
    )


@dataclass(frozen=True)
class Comparison:
    """Operators of all ranks, being compared; ``wait`` raises where they differ."""

    mesh: Mesh
    entries: list[Entry]
    are_same: Callable[[], bool]
    """Waits for the other ranks."""

    def wait(self) -> None:
        """Raises on all ranks if they ran different operators. Collective over all ranks."""
        with contact("comparing operators", self.mesh):
            if self.are_same():
                return
            texts: list[list[str]] = [[]] * self.mesh.num_ranks
            with untraced():
                dist.all_gather_object(texts, [*map(str, self.entries)], group=self.mesh.group)
        runs = {rank: (0, text) for rank, text in enumerate(texts)}
        difference = first_difference(runs, shared=max(map(len, texts)))
        raise CommError(
            f"ranks ran different operators: {difference}, counted from the last forward pass "
            "that was the same on all; every rank must run the same model and loss on inputs of "
            "the same global shape"
        )


def post_comparison(entries: list[Entry], mesh: Mesh) -> Comparison:
    """Begins to compare the operators ``entries`` over all ranks, and does not wait.

    Collective over all ranks. Sixteen bytes travel.
    """
    with contact("comparing operators", mesh):
        return Comparison(mesh, entries, _post_equality(digest(entries), mesh))


def _post_equality(mine: int, mesh: Mesh) -> Callable[[], bool]:
    """Begins to find whether all ranks bring the same number; the call that is returned waits."""
    if mesh.sockets is not None and len(mesh.sockets.peers) == mesh.num_ranks - 1:
        ranks, limit = range(mesh.num_ranks), mesh.timeout.total_seconds()
        numbers = mesh.sockets.share(torch.tensor([mine]), mesh.rank, ranks, _DIGEST, limit)
        return lambda: {*map(int, numbers.wait())} == {mine}
    ends = torch.tensor([mine, -mine])
    work = dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.group, async_op=True)

    def are_same() -> bool:
        work.wait()
        return int(ends[0]) == -int(ends[1])

    return are_same


def _cut_to_difference(first: str, second: str) -> list[str]:
    """Both texts, shortened to what lies around the first difference if they are long."""
    if max(len(first), len(second)) <= LONG:
        return [first, second]
    pairs = zip(f"{first}\0", f"{second}\1", strict=False)
    place = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
    start = max(0, place - LONG // 4)
    return [
        "... " * (start > 0) + text[start : start + LONG] + " ..." * (len(text) > start + LONG)
        for text in (first, second)
    ]
