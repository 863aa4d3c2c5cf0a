"""The slots in which ranks keep samples, and how ranks of one node see each other's."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.store.budget import DISK_SHARE, MEMORY_SHARE, free_disk, free_memory
from hyperslab.store.segment import Address, Segment, map_segment, node_name

EMPTY, READY, BAD = 0, 1, 2


@dataclass(frozen=True)
class Holding:
    """What one rank keeps, as it tells the others.

    Its first samples lie in memory, the next ones on its node's disk, the rest in the files only.
    """

    node: str
    pid: int
    num_memory: int
    num_disk: int
    slot_nbytes: int
    flags: Address
    memory: Address
    disk: Address

    @property
    def num_slots(self) -> int:
        return self.num_memory + self.num_disk


@dataclass(frozen=True)
class Shelf:
    """The slots of one rank, mapped into this process; ``flags`` tell which are filled."""

    slot_nbytes: int
    flags: NDArray[np.uint8]
    memory: NDArray[np.uint8]
    disk: NDArray[np.uint8]

    def slot(self, number: int) -> NDArray[np.uint8]:
        num_memory = len(self.memory) // max(1, self.slot_nbytes)
        in_memory = number < num_memory
        place = (number if in_memory else number - num_memory) * self.slot_nbytes
        return (self.memory if in_memory else self.disk)[place : place + self.slot_nbytes]


_own_shelves: weakref.WeakSet[OwnShelf] = weakref.WeakSet()
"""Of all loaders of this process, which share the memory of the node."""


class OwnShelf:
    """This rank's slots: as many as memory and disk allow, of the ``num_owned`` that it wants."""

    promised_nbytes: int
    """Of slots in memory that have no pages yet."""

    def __init__(
        self,
        num_owned: int,
        slot_nbytes: int,
        num_local: int,
        memory_budget: int | None,
        spill_dir: Path | None,
    ) -> None:
        if memory_budget is None:
            promised = sum(shelf.promised_nbytes for shelf in _own_shelves)
            memory_budget = max(0, int(free_memory() * MEMORY_SHARE / num_local) - promised)
        num_memory = min(num_owned, memory_budget // max(1, slot_nbytes))
        num_disk = _num_on_disk(num_owned - num_memory, slot_nbytes, num_local, spill_dir)
        self._memory = _in_memory(num_memory * slot_nbytes)
        self._disk = _spilled(num_disk * slot_nbytes, spill_dir)
        self._flags = Segment(num_memory + num_disk)
        self.holding = Holding(
            node=node_name(),
            pid=os.getpid(),
            num_memory=num_memory,
            num_disk=num_disk,
            slot_nbytes=slot_nbytes,
            flags=self._flags.address,
            memory=self._memory.address,
            disk=self._disk.address,
        )
        self.promised_nbytes = num_memory * slot_nbytes
        _own_shelves.add(self)

    def as_shelf(self) -> Shelf:
        segments = (self._flags, self._memory, self._disk)
        return Shelf(self.holding.slot_nbytes, *(segment.bytes for segment in segments))

    def reserve(self, number: int) -> None:
        """Makes sure that a slot can be written to."""
        num_memory, size = self.holding.num_memory, self.holding.slot_nbytes
        if number >= num_memory:  # on disk, reserved from the start
            return
        try:
            self._memory.reserve(number * size, (number + 1) * size)
            self.promised_nbytes -= size
        except OSError as error:
            raise ConfigError(
                f"there is no memory for sample {number + 1} of {num_memory} that were to be kept, "
                f"{size} bytes each ({error.strerror}): give the loader a smaller memory_budget"
            ) from error

    def close(self) -> None:
        _own_shelves.discard(self)
        for segment in (self._flags, self._memory, self._disk):
            segment.close()


def _num_on_disk(num: int, slot_nbytes: int, num_local: int, spill_dir: Path | None) -> int:
    if spill_dir and not spill_dir.is_dir():
        raise ConfigError(f"spill_dir {spill_dir} is not a directory")
    if not num:
        return 0
    free = free_disk(spill_dir or Path(tempfile.gettempdir()))
    return min(num, int(free * DISK_SHARE / num_local) // max(1, slot_nbytes))


def _in_memory(nbytes: int) -> Segment:
    try:
        return Segment(nbytes)
    except OSError as error:
        raise ConfigError(
            f"{nbytes} bytes of memory for samples cannot be had: {error.strerror}; set a smaller "
            "memory_budget, raise the limit on files (ulimit -f), which counts here, or use "
            "store='none'"
        ) from error


def _spilled(nbytes: int, spill_dir: Path | None) -> Segment:
    if not nbytes:
        return Segment(0)
    folder = spill_dir or Path(tempfile.gettempdir())
    try:
        return Segment(nbytes, folder)
    except OSError as error:
        raise ConfigError(
            f"{nbytes} bytes for samples that do not fit into memory cannot be reserved in "
            f"{folder}: {error.strerror}; name another spill_dir"
        ) from error


def map_shelves(holdings: Sequence[Holding], rank: int, own: Shelf) -> Mapping[int, Shelf]:
    """The shelves that this process can see: its own, and those of ranks on its node.

    Another user's, or one in another container, is out of sight; its boxes come as messages.
    """
    shelves = {rank: own}
    for other, theirs in enumerate(holdings):
        if other == rank or theirs.node != holdings[rank].node:
            continue
        try:
            maps = [map_segment(place) for place in (theirs.flags, theirs.memory, theirs.disk)]
        except OSError:
            continue
        shelves[other] = Shelf(theirs.slot_nbytes, *maps)
    return shelves
