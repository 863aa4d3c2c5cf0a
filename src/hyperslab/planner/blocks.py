"""The modules of a network that can have a cut or a checkpoint of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from hyperslab.planner.network import Network


@dataclass(frozen=True)
class Block:
    """A module that runs once, and what follows it up to the next."""

    name: str
    """Of the module; none for what comes before the first."""
    own: Sequence[int]
    """The numbers of the layers inside it."""
    numbers: Sequence[int]
    """And with those that follow: they go on as its output comes."""


@lru_cache(maxsize=64)
def blocks(network: Network) -> tuple[Block, ...]:
    """In the order of their calls; together they have all layers."""
    numbers = range(len(network.layers))
    runs = [
        (name, [*each])
        for name, each in groupby(numbers, key=lambda n: _around(network, network.layers[n].module))
    ]
    counts = Counter(name for name, _ in runs)
    found: list[Block] = []
    for name, run in runs:
        is_one = name and counts[name] == 1 and not _has_parts(name, counts)
        if is_one or not found:
            found.append(Block(name if is_one else "", run, run))
        else:
            last = found[-1]
            found[-1] = Block(last.name, last.own, [*last.numbers, *run])
    return tuple(found)


def _around(network: Network, module: str) -> str:
    """``features.0.conv`` belongs to ``features.0``, where ``features`` is a row of modules."""
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    length = numbered[0] + 1 if numbered else 1
    while ".".join(parts[:length]) in network.containers and length < len(parts):
        length += 1
    return ".".join(parts[:length])


def _has_parts(name: str, others: Counter[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in others)
