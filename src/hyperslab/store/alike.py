"""Loaders of all ranks that must be alike, or stop together."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from hyperslab.errors import CommError
from hyperslab.io import Dataset
from hyperslab.store.peers import Peers
from hyperslab.store.segment import node_name


def check_alike(dataset: Dataset, arguments: Mapping[str, object], peers: Peers) -> None:
    """Raises on every rank unless all have like arguments and the same files.

    Files are the same if their names and sizes are; on one node, if they are the very same. What
    they are like now is remembered, and one that is found changed later raises.

    Collective over all ranks.
    """
    versions = dataset.fix_versions()
    files = [
        (path.name, version and version[0])
        for path, version in zip(dataset.paths, versions, strict=True)
    ]
    mine = {
        **{name: repr(value) for name, value in arguments.items()},
        "the arrays": repr(dataset.arrays),
        "the tiles": repr([tiling.extents for tiling in dataset.tilings]),
        "the names and sizes of the files": _digest(files),
    }
    everywhere = peers.tell_all((node_name(), mine, _digest(versions)))
    first_of_node = {node: rank for rank, (node, *_) in reversed(list(enumerate(everywhere)))}
    for rank, (node, theirs, version) in enumerate(everywhere):
        for name, value in theirs.items():
            if value != everywhere[0][1][name]:
                _raise_unlike(name, 0, everywhere[0][1][name], rank, value)
        other = first_of_node[node]
        if version != everywhere[other][2]:
            _raise_unlike("the versions of the files", other, everywhere[other][2], rank, version)


def _raise_unlike(name: str, first: int, value: str, second: int, other: str) -> None:
    raise CommError(
        f"loaders differ in {name}: rank {first} has {value}, rank {second} has {other}; give all "
        "ranks the same arguments and the same files"
    )


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()
