"""What one rank finds out for all, and what all find out together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from hyperslab.errors import FormatError, HyperslabError
from hyperslab.io.manifest import Manifest, look_at_files, version_of

T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that read data together, such as those of a mesh."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def ask_first(self, call: Callable[[], T]) -> T:
        """What ``call`` returns on rank 0, on all ranks; its error is raised on all."""

    def tell_all(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""


def shared(make: Callable[[], Manifest], ranks: Ranks) -> Manifest:
    """The manifest that rank 0 makes, on all of them: they look at no file but one.

    Where that is not the one that rank 0 has seen, files lie on this node's own disk: what they
    are like here is looked up. Collective over all ranks.
    """
    return as_seen_here(ranks.ask_first(make))


def as_seen_here(manifest: Manifest) -> Manifest:
    """A manifest that another rank has made, with the versions of this node's files."""
    first = next((file for file in manifest.all_files() if file.version is not None), None)
    if first is None or version_of(first.path) == first.version:
        return manifest
    sources = [replace(source, files=look_at_files(source.files)) for source in manifest.sources]
    return replace(manifest, sources=tuple(sources))


def on_all(call: Callable[[], T], ranks: Ranks | None) -> list[T]:
    """What ``call`` gives on each rank; an error of one is raised on all.

    Collective over all ranks.
    """
    if ranks is None or ranks.num_ranks == 1:
        return [call()]
    result, fault = list[T](), ""
    try:
        result.append(call())
    except HyperslabError as error:
        fault = str(error)
    told = ranks.tell_all((fault, result))
    for rank, (theirs, _) in enumerate(told):
        if theirs:
            raise FormatError(f"{theirs} (rank {rank})")
    return [found for _, (found,) in told]
