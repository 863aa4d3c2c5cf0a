"""The samples in the memory of the ranks: each keeps its own boxes of its share of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import CommError, ConfigError, FormatError
from hyperslab.io import Dataset
from hyperslab.io.schedule import Schedule
from hyperslab.layout import Box
from hyperslab.store.peers import Peers, ranks_of_node
from hyperslab.store.placement import Placement, assign_owners
from hyperslab.store.rma import Window
from hyperslab.store.segment import SlotFormat
from hyperslab.store.slots import BAD, EMPTY, READY, Flags, OwnSlots, map_slots, tell_refused
from hyperslab.trace import Category, Tier, active

_log = logging.getLogger("hyperslab")

_POLL_SECONDS = 0.0002


@dataclass(frozen=True)
class Request:
    """A box of one array of one sample."""

    index: int
    array: str
    box: Box


Filled = tuple[Request, NDArray[Any]]
"""A request, and the array that it is to fill."""
RequestsOf = Callable[[int, int], Sequence[Request]]
"""What a rank takes of a sample, by the sample's index and the rank."""
Awaited = tuple[Request, int, Box, NDArray[Any]]
"""A request, who keeps a part of it, that part, and the array that it is to fill."""


class MemoryStore:
    """Every sample is read once, by the rank that visits it first, and then taken from there.

    A rank fills a slot when the schedule first asks for its sample, whoever takes it, and sets the
    slot's flag, even if it fails; takers wait for the flag and copy. Slots are written once. Ranks
    of one node map each other's slots; to others boxes travel as messages, which both sides know
    from the schedule.

    Making it is collective over all ranks, as is ``swap``.
    """

    def __init__(
        self,
        dataset: Dataset,
        placement: Placement,
        schedule: Schedule,
        peers: Peers,
        *,
        first_epoch: int = 0,
        memory_budget: int | None = None,
        spill_dir: Path | None = None,
        timeout_seconds: float = 600.0,
        uses_mpi: bool = False,
    ) -> None:
        self._dataset, self._placement, self._peers = dataset, placement, peers
        self._timeout_seconds = timeout_seconds
        self._owners = assign_owners(schedule, placement.num_shares, first_epoch)
        self._formats: dict[int, SlotFormat] = {}
        self._window: Window | None = None
        self._own = self._made_slots(memory_budget, spill_dir)
        self.holdings = peers.tell_all(self._own.holding)
        own = self._own.as_seen()
        self._slots, sight = map_slots(self.holdings, placement.rank, own)
        self._sights = peers.tell_all(sight)
        if placement.rank == 0 and (words := tell_refused(self._sights)):
            _log.warning(words)
        memory = self._slots[placement.rank].memory
        if uses_mpi and placement.grid.num_ranks > 1:
            self._window = Window(memory, placement.grid, placement.rank)
        self._begun: set[int] = set()
        self._faults: dict[int, str] = {}
        self._failures: dict[int, str] = {}
        self._stopped = threading.Event()

    def _made_slots(self, memory_budget: int | None, spill_dir: Path | None) -> OwnSlots:
        """This rank's slots; raises on all ranks if one has no room for its own."""
        rank, num_local = self._placement.rank, len(ranks_of_node(self._peers))
        num_owned = self._owners.num_owned(self._placement.share)
        nbytes, faults = self._format(rank).nbytes, {}
        try:
            slots = OwnSlots(num_owned, nbytes, num_local, memory_budget, spill_dir)
        except ConfigError as error:
            faults[rank] = str(error)
        if faults := self._peers.merge_faults(faults):
            raise ConfigError(faults[min(faults)])
        return slots

    def to_fill(self, indices: Sequence[int]) -> list[int]:
        """Those of ``indices`` that this rank is to ``fill`` now; each is named once."""
        placement = self._placement
        new = [
            index
            for index in indices
            if self._owners.shares[index] == placement.share
            and self._slot(index, placement.rank) is not None
            and index not in self._begun
        ]
        self._begun.update(new)
        return new

    def fill_all(self) -> list[int]:
        """All samples that this rank keeps, to ``fill`` them before the first is asked for."""
        return self.to_fill(np.flatnonzero(self._owners.shares == self._placement.share).tolist())

    def fill(self, index: int) -> None:
        """Reads this rank's boxes of a sample into their slot."""
        rank = self._placement.rank
        number, flag = self._slot(index, rank), BAD
        assert number is not None
        try:
            self._own.reserve(number)
            for name, array in self._arrays(index, rank).items():
                self._dataset.read(index, self._placement.box(name), out=array, array=name)
            flag = READY
        except FormatError as error:
            self._faults[index] = str(error)
        except BaseException as error:
            self._failures[index] = f"{type(error).__name__}: {error}"
            raise
        finally:  # whatever went wrong, nobody waits for it
            self._slots[rank].flags.set(number, flag)

    def faults(self, indices: Sequence[int]) -> dict[int, str]:
        """What was wrong with the files of those of ``indices`` that this rank could not fill."""
        return {index: self._faults[index] for index in indices if index in self._faults}

    def failure(self, indices: Sequence[int]) -> str | None:
        """Why this rank could not fill one of ``indices``, if not for its file."""
        return next((self._failures[index] for index in indices if index in self._failures), None)

    def take(self, request: Request, out: NDArray[Any]) -> None:
        """Fills ``out`` with what this rank can see of a box; ``swap`` brings the rest."""
        for holder, part in self._holders(request, self._placement.rank):
            view = _part_of(out, request.box, part)
            if self._slot(request.index, holder) is None:
                self._dataset.read(request.index, part, out=view, array=request.array)
            elif holder in self._slots and self._wait(request.index, holder) == READY:
                tier, nbytes = self._tier(request.index, holder), view.nbytes
                with active.around(Category.exchange, f"from rank {holder}", nbytes, tier=tier):
                    np.copyto(view, self._part(request, holder, part))

    def swap(self, indices: Sequence[int], mine: Sequence[Filled], requests_of: RequestsOf) -> None:
        """Brings the parts of ``mine`` that lie out of sight, and sends what others request.

        ``indices`` are those of the whole batch; ``requests_of`` tells what a rank takes of one.
        Called when this rank has filled all that it keeps of the batch.
        """
        if all(len(sight.seen) == len(self._sights) for sight in self._sights):
            return
        awaited = [
            (request, holder, part, _part_of(out, request.box, part))
            for request, out in mine
            for holder, part in self._holders(request, self._placement.rank)
            if holder not in self._slots and self._slot(request.index, holder) is not None
        ]
        nbytes = sum(out.nbytes for *_, out in awaited)
        with active.around(Category.exchange, "between nodes", nbytes, tier=Tier.peer):
            if self._window:
                self._get(self._window, awaited)
            else:
                self._receive(awaited, self._sends(indices, requests_of))

    def _receive(
        self, awaited: Sequence[Awaited], sends: Sequence[tuple[int, NDArray[Any]]]
    ) -> None:
        received = [(holder, np.empty(out.shape, out.dtype)) for _, holder, _, out in awaited]
        self._peers.swap(sends, received)
        for (*_, out), (_, array) in zip(awaited, received, strict=True):
            np.copyto(out, array)

    def _get(self, window: Window, awaited: Sequence[Awaited]) -> None:
        """Reads the slots of other nodes, whose owners have filled them before the fence."""
        slots = {(w.index, h): np.empty(self._format(h).nbytes, np.uint8) for w, h, *_ in awaited}
        places = [
            (holder, int(self._owners.numbers[index]) * len(slot), slot)
            for (index, holder), slot in slots.items()
        ]
        window.get(places)
        for request, holder, part, out in awaited:
            array = self._arrays_in(slots[request.index, holder], holder)[request.array]
            box = self._placement.box(request.array, holder)
            np.copyto(out, _part_of(array, box, part))

    def _sends(
        self, indices: Sequence[int], requests_of: RequestsOf
    ) -> list[tuple[int, NDArray[Any]]]:
        """What ranks that cannot see this one request and it keeps, in batch order."""
        placement, rank = self._placement, self._placement.rank
        kept = [
            (taker, index)
            for span, takers in zip(
                placement.spans(len(indices)), placement.ranks_by_share, strict=True
            )
            for index in indices[span.start : span.stop]
            if self._owners.shares[index] == placement.share and self._slot(index, rank) is not None
            for taker in takers
            if rank not in self._sights[taker].seen
        ]
        return [
            (taker, self._sent(request, part))
            for taker, index in kept
            for request in requests_of(index, taker)
            for holder, part in self._holders(request, taker)
            if holder == rank
        ]

    def _sent(self, request: Request, part: Box) -> NDArray[Any]:
        """``part`` as others get it; zeros where it failed, as its slot may have no pages."""
        if request.index in self._failures:
            return np.zeros(part.shape, self._placement.arrays[request.array].dtype)
        return np.ascontiguousarray(self._part(request, self._placement.rank, part))

    def _holders(self, request: Request, taker: int) -> list[tuple[int, Box]]:
        """Who keeps the parts of a box that ``taker`` requests; nobody those of an empty one."""
        if not request.box:
            return []
        share = int(self._owners.shares[request.index])
        return self._placement.holders(request.array, share, request.box, taker)

    def _slot(self, index: int, rank: int) -> int | None:
        """The slot of a sample on the rank that keeps it, or None where it stays in the files."""
        number, holding = int(self._owners.numbers[index]), self.holdings[rank]
        # MPI sees memory only: what a rank of another node has on disk is read from the files.
        is_far = self._window is not None and rank not in self._slots
        return number if number < (holding.num_memory if is_far else holding.num_slots) else None

    def _tier(self, index: int, holder: int) -> Tier:
        """Where a slot of this node lies."""
        number = self._slot(index, holder)
        in_memory = number is not None and number < self.holdings[holder].num_memory
        return Tier.memory if in_memory else Tier.disk

    def _part(self, request: Request, holder: int, part: Box) -> NDArray[Any]:
        array = self._arrays(request.index, holder)[request.array]
        return _part_of(array, self._placement.box(request.array, holder), part)

    def _arrays(self, index: int, rank: int) -> dict[str, NDArray[Any]]:
        """The arrays in a slot, channels first."""
        number = self._slot(index, rank)
        assert number is not None
        return self._arrays_in(self._slots[rank].slot(number), rank)

    def _arrays_in(self, slot: NDArray[np.uint8], rank: int) -> dict[str, NDArray[Any]]:
        stored = self._format(rank).arrays(slot)
        specs = self._placement.arrays
        return {
            name: array.transpose(specs[name].axes.order)
            for name, array in zip(specs, stored, strict=True)
        }

    def _format(self, rank: int) -> SlotFormat:
        """Of the slots of ``rank``, in which arrays lie in the file's order of dims."""
        if rank not in self._formats:
            specs = self._placement.arrays.values()
            boxes = [self._placement.box(spec.name, rank) for spec in specs]
            shapes = [s.axes.in_file_order(b.shape) for s, b in zip(specs, boxes, strict=True)]
            self._formats[rank] = SlotFormat(tuple(shapes), tuple(spec.dtype for spec in specs))
        return self._formats[rank]

    def _wait(self, index: int, holder: int) -> int:
        """The flag of a slot, once its holder has filled it or could not."""
        number = self._slot(index, holder)
        assert number is not None
        flags = self._slots[holder].flags
        if (flag := flags.get(number)) != EMPTY:
            return flag
        # This rank's own reading is recorded where it is done.
        category = Category.other if holder == self._placement.rank else Category.exchange
        with active.around(category, f"until rank {holder} has read it"):
            return self._awaited(index, holder, flags, number)

    def _awaited(self, index: int, holder: int, flags: Flags, number: int) -> int:
        deadline = time.monotonic() + self._timeout_seconds
        while (flag := flags.get(number)) == EMPTY:
            if self._stopped.wait(_POLL_SECONDS):
                raise CommError("the loader was closed")
            late = time.monotonic() > deadline
            if late or not _is_alive(self.holdings[holder].pid):
                raise CommError(
                    f"rank {self._placement.rank} waits for sample {index} from rank {holder}, "
                    + (f"in vain for {self._timeout_seconds:g} s" if late else "which has ended")
                )
        return flag

    def stop_waiting(self) -> None:
        """Lets go of those who wait for other ranks, with an error."""
        self._stopped.set()

    def close(self) -> None:
        self._slots, self._window = {}, None
        self._own.close()


def _part_of(array: NDArray[Any], box: Box, part: Box) -> NDArray[Any]:
    """A view of ``part`` in an array that holds ``box``; of a scalar too."""
    where: tuple[Any, ...] = (*part.slices_in(box), ...)
    view: NDArray[Any] = array[where]
    return view


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
