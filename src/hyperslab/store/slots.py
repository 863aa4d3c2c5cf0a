"""The slots in which ranks keep samples, and how ranks of one node see each other's."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.store.budget import DISK_SHARE, MEMORY_SHARE, free_disk, free_memory
from hyperslab.store.segment import (
    Address,
    Segment,
    machine_name,
    map_segment,
    node_name,
    open_segment,
    view_segment,
)

EMPTY, READY, BAD = 0, 1, 2


class Flags:
    """A byte a slot, which its owner sets when it is done with the slot, and other ranks await.

    A processor may show the flag to another one before what was written into the slot, and may read
    a slot ahead of its flag: x86 does neither, ARM and POWER do both. Python has no fence, and a
    system call need not be one. A lock that both sides take is, on every processor: the owner
    sets the flag while it holds the lock of the flags' file, and whoever has seen the flag takes
    that lock before it reads the slot, hence after the owner has let go of it.
    """

    def __init__(self, fd: int, flags: NDArray[np.uint8]) -> None:
        """Of the file ``fd``, which is closed when nothing refers to the flags any more."""
        self._fd, self._flags = fd, flags
        self._threads = threading.Lock()  # those of a process hold the file's lock as one
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def of(cls, segment: Segment) -> Flags:
        """Those of this rank itself."""
        return cls(segment.duplicate_fd(), segment.bytes)

    @classmethod
    def map(cls, address: Address) -> Flags:
        """Those of another rank of the node; OSError if they are out of reach."""
        fd = open_segment(address)
        try:
            return cls(fd, view_segment(fd, address))
        except OSError:
            os.close(fd)
            raise

    def set(self, number: int, flag: int) -> None:
        """Called when all that belongs into the slot has been written."""
        with self._locked(fcntl.LOCK_EX):
            self._flags[number] = flag

    def get(self, number: int) -> int:
        """The flag; if it is set, what was written into the slot before can be read."""
        flag = int(self._flags[number])
        if flag != EMPTY:
            with self._locked(fcntl.LOCK_SH):
                pass
        return flag

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._fd, how)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


@dataclass(frozen=True)
class Holding:
    """What one rank keeps, as it tells the others.

    Its first samples lie in memory, the next ones on its node's disk, the rest in the files only.
    """

    machine: str
    node: str
    """Ranks of one node can see each other's memory."""
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
class RankSlots:
    """The slots of one rank, mapped into this process; ``flags`` tell which are filled."""

    slot_nbytes: int
    flags: Flags
    memory: NDArray[np.uint8]
    disk: NDArray[np.uint8]

    def slot(self, number: int) -> NDArray[np.uint8]:
        num_memory = len(self.memory) // max(1, self.slot_nbytes)
        in_memory = number < num_memory
        place = (number if in_memory else number - num_memory) * self.slot_nbytes
        return (self.memory if in_memory else self.disk)[place : place + self.slot_nbytes]


_own_slots: weakref.WeakSet[OwnSlots] = weakref.WeakSet()
"""Of all loaders of this process, which share the memory of the node."""


class OwnSlots:
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
            promised = sum(slots.promised_nbytes for slots in _own_slots)
            memory_budget = max(0, int(free_memory() * MEMORY_SHARE / num_local) - promised)
        num_memory = min(num_owned, memory_budget // max(1, slot_nbytes))
        num_disk = _num_on_disk(num_owned - num_memory, slot_nbytes, num_local, spill_dir)
        self._memory = _in_memory(num_memory * slot_nbytes)
        self._disk = _spilled(num_disk * slot_nbytes, spill_dir)
        self._flags = Segment(num_memory + num_disk)
        self.holding = Holding(
            machine=machine_name(),
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
        _own_slots.add(self)

    def as_seen(self) -> RankSlots:
        flags = Flags.of(self._flags)
        return RankSlots(self.holding.slot_nbytes, flags, self._memory.bytes, self._disk.bytes)

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
        _own_slots.discard(self)
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


@dataclass(frozen=True)
class Sight:
    """Which ranks' slots a rank can see, its own too, and why not those of others nearby."""

    seen: frozenset[int]
    refused: Mapping[int, str]


def map_slots(
    holdings: Sequence[Holding], rank: int, own: RankSlots
) -> tuple[Mapping[int, RankSlots], Sight]:
    """The slots that this process can see: its own, and those of ranks on its node.

    The boxes of others come as messages, also those of a rank on the same machine that is another
    user's, or in another container.
    """
    slots, refused = {rank: own}, {}
    for other, theirs in enumerate(holdings):
        if other == rank or theirs.machine != holdings[rank].machine:
            continue
        if theirs.node != holdings[rank].node:
            refused[other] = "they run in different containers"
            continue
        try:
            slots[other] = RankSlots(
                theirs.slot_nbytes,
                Flags.map(theirs.flags),
                map_segment(theirs.memory),
                map_segment(theirs.disk),
            )
        except OSError as error:
            refused[other] = str(error)
    return slots, Sight(frozenset(slots), refused)


def tell_refused(sights: Sequence[Sight]) -> str | None:
    """A line for the user if ranks of one machine do not share memory."""
    pairs = [(rank, other) for rank, sight in enumerate(sights) for other in sight.refused]
    if not pairs:
        return None
    rank, other = pairs[0]
    more = f", nor {len(pairs) - 1} others theirs" if len(pairs) > 1 else ""
    return (
        f"rank {rank} cannot map the memory of rank {other} on the same machine{more} "
        f"({sights[rank].refused[other]}): samples come as messages instead, which takes longer; "
        "run all ranks of a machine as one user, in one container"
    )
