"""Messages of host memory beside those of the model, from a thread of their own.

``do_together`` and its like run work beside the model in which all ranks succeed or all raise the
same error. ``agree`` does so for calls on the model's own path, where errors keep their type on the
rank that has them. Here they have the same type and text on all, so that all can handle them alike.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from hyperslab.comm.failure_report import contact_beside_passes
from hyperslab.comm.local_sockets import MAX_NBYTES, LocalSockets, connect
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError, FormatError, HyperslabError

T = TypeVar("T")

_FRAME_NBYTES = 4096
"""Of the first message with a value for ranks of the same node; it begins with the value's size."""
_SIZE = np.dtype(np.int64)


class SideChannel:
    """A process group over all ranks of a mesh, for one thread at a time and host memory only.

    Making one is collective over all ranks, as are its calls. It talks by gloo whatever the mesh
    does, and by sockets of its own, so that it can run beside the model's own messages.
    """

    def __init__(self, mesh: Mesh, doing: str) -> None:
        self.mesh, self.grid, self.rank, self._doing = mesh, mesh.grid, mesh.rank, doing
        self._group: ProcessGroup | None = None
        self._sockets: LocalSockets | None = None
        """To all other ranks, if they run on one node: for what is small, and sent often."""
        if mesh.num_ranks > 1:
            with contact_beside_passes("making a channel for " + doing, mesh):
                self._group = dist.new_group(backend="gloo", timeout=mesh.timeout)
            found = connect(self.rank, self.tell_all)
            if found is not None and len(found.peers) == mesh.num_ranks - 1:
                self._sockets = found
            elif found is not None:
                found.close()

    @property
    def group(self) -> ProcessGroup | None:
        """The process group, for calls of torch's own; None with one rank."""
        return self._group

    def tell_all(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self._group is None:
            return [value]
        if self._sockets is not None and (found := self._tell_near(value)) is not None:
            return found
        values: list[T] = [value] * self.grid.num_ranks
        with contact_beside_passes(self._doing, self.mesh):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _tell_near(self, value: T) -> list[T] | None:
        """``tell_all`` by sockets: a frame of each, then what did not fit; None: it is too much."""
        mine, fits = np.frombuffer(pickle.dumps(value), np.uint8), _FRAME_NBYTES - _SIZE.itemsize
        frame = np.zeros(_FRAME_NBYTES, np.uint8)
        frame[: _SIZE.itemsize].view(_SIZE)[0] = len(mine)
        frame[_SIZE.itemsize :][: len(mine)] = mine[:fits]
        told = self._share(frame)
        sizes = [int(each[: _SIZE.itemsize].view(_SIZE)[0]) for each in told]
        bodies = [each[_SIZE.itemsize :] for each in told]
        if (longest := max(sizes) - fits) > MAX_NBYTES:
            return None
        if longest > 0:
            rest = np.zeros(longest, np.uint8)
            rest[: max(0, len(mine) - fits)] = mine[fits:]
            pairs = zip(bodies, self._share(rest), strict=True)
            bodies = [np.concatenate(pair) for pair in pairs]
        return [
            pickle.loads(body[:size].tobytes()) for body, size in zip(bodies, sizes, strict=True)
        ]

    def _share(self, mine: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Bytes of all ranks, by rank; all bring equally many."""
        assert self._sockets is not None
        ranks, limit = range(self.grid.num_ranks), self.mesh.timeout.total_seconds()
        with contact_beside_passes(self._doing, self.mesh):
            told = self._sockets.share(torch.from_numpy(mine), self.rank, ranks, 0, limit)
            return [each.numpy() for each in told.wait()]

    def merge_faults(self, faults: Mapping[int, str]) -> dict[int, str]:
        """The faults that any rank has; of several for a key, that of the lowest rank.

        One number travels where there are none.
        """
        if self._group is None:
            return dict(faults)
        if not self.post_max(len(faults))():
            return {}
        told = self.tell_all({key: f"{why} (rank {self.rank})" for key, why in faults.items()})
        return {key: why for theirs in reversed(told) for key, why in theirs.items()}

    def post_max(self, number: int) -> Callable[[], int]:
        """Begins to find the largest ``number`` of all ranks; the call that is returned waits."""
        if self._group is None:
            return lambda: number
        largest = torch.tensor([number])
        if self._sockets is not None:
            ranks, limit = range(self.grid.num_ranks), self.mesh.timeout.total_seconds()
            with contact_beside_passes(self._doing, self.mesh):
                numbers = self._sockets.share(largest, self.rank, ranks, 0, limit)

            def find() -> int:
                with contact_beside_passes(self._doing, self.mesh):
                    return max(map(int, numbers.wait()))

            return find
        with contact_beside_passes(self._doing, self.mesh):
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> int:
            with contact_beside_passes(self._doing, self.mesh):
                work.wait()
            return int(largest)

        return wait

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        """Sends arrays to ranks and fills others from ranks, between two ranks in this order."""
        if not sends and not receives:
            return
        assert self._group is not None
        with contact_beside_passes(self._doing, self.mesh):
            works = [self._group.send([_raw(array)], rank, 0) for rank, array in sends]
            works += [self._group.recv([_raw(array)], rank, 0) for rank, array in receives]
            for work in works:
                work.wait()

    def close(self) -> None:
        """Gives the group up; no other rank may still be in a call."""
        group, self._group = self._group, None
        if self._sockets is not None:
            self._sockets.close()
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # the others are gone, or all groups are
                dist.destroy_process_group(group)


def _raw(array: NDArray[Any]) -> Tensor:
    """Its bytes: gloo does not know every dtype."""
    return torch.from_numpy(array.reshape(-1).view("uint8"))


Result = TypeVar("Result")


class _Fault(NamedTuple):
    """An error as it travels between ranks."""

    error_type: type[HyperslabError]
    text: str


def do_together(call: Callable[[], Result], channel: SideChannel) -> Result:
    """What ``call`` returns; an error that it raises on one rank is raised on all of them."""
    result, fault, cause = _attempt(call, channel.rank)
    if channel.post_max(fault is not None)():  # a number, which is sent sooner than words
        first = next(each for each in channel.tell_all(fault) if each)
        raise first.error_type(first.text) from cause
    return cast(Result, result)


def do_on_first(call: Callable[[], object], channel: SideChannel) -> None:
    """Runs ``call`` on rank 0; the others wait until it is done."""
    do_together(call if channel.rank == 0 else lambda: None, channel)


def ask_first(call: Callable[[], Result], channel: SideChannel) -> Result:
    """What ``call`` returns on rank 0, on all ranks."""
    mine: tuple[Result | None, _Fault | None, Exception | None] = (None, None, None)
    if channel.rank == 0:
        mine = _attempt(call, channel.rank)
    result, fault = channel.tell_all(mine[:2])[0]
    if fault is not None:
        raise fault.error_type(fault.text) from mine[2]
    return cast(Result, result)


def _attempt(
    call: Callable[[], Result], rank: int
) -> tuple[Result | None, _Fault | None, Exception | None]:
    try:
        return call(), None, None
    except HyperslabError as error:
        return None, _Fault(type(error), str(error)), error
    except OSError as error:
        return None, _Fault(FormatError, f"{error.filename}: {error.strerror}"), error
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        return None, _Fault(CommError, f"rank {rank}: {type(error).__name__}: {error}"), error
