"""What a loader says to the loaders of the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from hyperslab.errors import CommError
from hyperslab.layout import Grid
from hyperslab.store.segment import node_name

T = TypeVar("T")
Faults = Mapping[int, str]
"""What was wrong with a sample, by its index; under ``FAILURE``, why a rank cannot go on."""
FAILURE = -1


class Peers(Protocol):
    """Collective calls over all ranks, in the same order on each; none is thread-safe."""

    grid: Grid
    rank: int

    def tell_all(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""

    def merge_faults(self, faults: Faults) -> dict[int, str]:
        """The faults that any rank has; of several for a sample, that of the lowest rank."""

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        """Sends arrays to ranks and fills others from ranks, between two ranks in this order."""

    def close(self) -> None:
        """Ends it, on this rank alone: no call is under way."""


def settle_failure(
    peers: Peers, faults: Faults, failure: str | None, cause: BaseException | None = None
) -> dict[int, str]:
    """The faults of all ranks; raises on all of them if one has a ``failure``.

    ``cause`` is the error itself, on the rank that has it. Collective over all ranks.
    """
    settled = peers.merge_faults({**faults, FAILURE: failure} if failure else faults)
    if words := settled.pop(FAILURE, None):
        raise cause or CommError(f"a batch could not be read: {words}")
    return settled


def ranks_of_node(peers: Peers) -> list[int]:
    """Those that run on this rank's node. Collective over all ranks."""
    here = node_name()
    return [rank for rank, node in enumerate(peers.tell_all(here)) if node == here]


class Alone:
    """One process, or one of several that share no more than their files."""

    def __init__(self, grid: Grid, rank: int = 0) -> None:
        self.grid, self.rank = grid, rank

    def tell_all(self, value: T) -> list[T]:
        assert self.grid.num_ranks == 1
        return [value]

    def merge_faults(self, faults: Faults) -> dict[int, str]:
        return dict(faults)

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        assert not sends
        assert not receives

    def close(self) -> None:
        pass
