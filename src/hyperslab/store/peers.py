"""What a loader says to the loaders of the other ranks, which must be like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from hyperslab.errors import CommError
from hyperslab.io import Dataset
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


class SingleProcess:
    """One process, or one of several that share no more than their files."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.rank = grid, 0

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


class _File(NamedTuple):
    """One of a dataset's files as a rank sees it."""

    path: str
    name: str
    nbytes: int | None
    """None if it is not there, or may not be looked at."""
    mtime_ns: int | None


def check_alike(dataset: Dataset, arguments: Mapping[str, object], peers: Peers) -> None:
    """Raises on every rank unless all have like arguments, the same files and samples.

    Files are the same if their names and sizes were when the data was opened; on one node, if they
    are the very same. One that is found changed later raises.

    Collective over all ranks. Digests travel; the list of files only if it differs.
    """
    files = _list_files(dataset)
    alike = _digest([(file.name, file.nbytes) for file in files])
    same = _digest([(file.name, file.nbytes, file.mtime_ns) for file in files])
    mine = {
        **{name: repr(value) for name, value in arguments.items()},
        "the arrays": _show_arrays(dataset),
        "the samples": f"{len(dataset)} ({dataset.manifest.digest():08x})",
        "the tiles": repr([tiling.extents for tiling in dataset.tilings]),
    }
    everywhere = peers.tell_all((node_name(), alike, same, mine))
    first_of_node = {node: rank for rank, (node, *_) in reversed(list(enumerate(everywhere)))}
    for rank, (node, theirs, version, _) in enumerate(everywhere):
        other = first_of_node[node]
        if theirs != everywhere[0][1] or version != everywhere[other][2]:
            first = 0 if theirs != everywhere[0][1] else other
            lists = peers.tell_all(files)
            raise CommError(_difference(first, lists[first], rank, lists[rank]))
    for rank, (*_, values) in enumerate(everywhere):
        for name, value in values.items():
            if value != (first_value := everywhere[0][3][name]):
                raise CommError(
                    f"loaders differ in {name}: rank 0 has {first_value}, rank {rank} has {value}; "
                    "give all ranks the same arguments and the same files"
                )


def _list_files(dataset: Dataset) -> list[_File]:
    return [
        _File(str(file.path), file.path.name, *(file.version or (None, None)))
        for file in dataset.manifest.all_files()
    ]


def _difference(first: int, ours: Sequence[_File], rank: int, theirs: Sequence[_File]) -> str:
    """The first file that two ranks do not have alike, and how it differs, in words."""
    for listed, others, has, lacks in ((ours, theirs, first, rank), (theirs, ours, rank, first)):
        known = {file.name for file in others}
        for file in listed:
            if file.name not in known:
                return (
                    f"rank {lacks} has no file {file.name}, which rank {has} has at {file.path} "
                    f"(rank {first} has {len(ours)} files, rank {rank} has {len(theirs)}); "
                    f"{_advice(lacks)}"
                )
    for mine, other in zip(ours, theirs, strict=False):
        if mine.name != other.name:
            return (
                f"ranks have the files in another order: where rank {first} has {mine.path}, rank "
                f"{rank} has {other.path}; give all ranks the same list"
            )
        if mine[1:] != other[1:]:
            return (
                f"{other.path} is not the same file on all ranks: rank {first} has "
                f"{_show_file(mine)}, rank {rank} has {_show_file(other)}; {_advice(rank)}"
            )
    return (
        f"rank {first} has {len(ours)} files and rank {rank} has {len(theirs)}, one of them more "
        "than once; give all ranks the same list"
    )


def _show_file(file: _File) -> str:
    if file.nbytes is None or file.mtime_ns is None:
        return "none"
    time = datetime.fromtimestamp(file.mtime_ns / 1e9)
    return f"{file.nbytes} bytes written at {time:%Y-%m-%d %H:%M:%S.%f}"


def _advice(rank: int) -> str:
    return f"copy the data to the node of rank {rank} again, or use a folder that all nodes share"


def _show_arrays(dataset: Dataset) -> str:
    shown = (
        f"{name!r} {spec.dtype} {spec.shape} ({'cut' if spec.is_cut else 'whole'}, axes "
        f"{spec.axes.letters or 'as they are'})"
        for name, spec in dataset.arrays.items()
    )
    return f"{', '.join(shown)} in {dataset.paths[0].name}"


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()
