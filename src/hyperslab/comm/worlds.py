"""Parts of the ranks as worlds of their own, which live and die apart.

A world has its own default process group, store and ranks from 0: meshes, FSDP, side channels and
failure reports of its ranks work as in a process group of all, and never wait for other worlds.
Ranks meet all others once, when the worlds are made. Later a world may lose its processes, or get
new ones, and the others do not notice here.
"""

from __future__ import annotations

import gc
import itertools
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm import join
from hyperslab.comm.launch import Launch, find_launch
from hyperslab.comm.mesh import Mesh, forget_groups, read_grid
from hyperslab.errors import CommError, ConfigError
from hyperslab.layout import AXES
from hyperslab.torch_private import default_store, forget_placements, known_groups, swap_world

T = TypeVar("T")

LOOK_SECONDS = 0.02
"""From one look at the store to the next, before the work begins."""
_FAILED = "failed"

_numbers = itertools.count()
"""Of divisions into worlds, the same on all ranks, which make them in the same order."""
_start_stores: list[Store] = []
"""Kept: a store that ended with its first user could not be told from its successor."""


@dataclass
class World:
    """The world that this rank is in, one of ``num_worlds``; made by ``split_ranks``."""

    number: int
    num_worlds: int
    launch: Launch
    """As if the ranks of this world were all."""
    first: int = 0
    """The rank, among all, of this world's rank 0."""
    _meeting: Store | None = None
    _num_told: int = 0
    _outer: ProcessGroup | None = None
    """The default group that was put aside."""
    _before: frozenset[ProcessGroup] = field(default_factory=frozenset)
    _sockets: list[Any] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def num_ranks(self) -> int:
        return self.launch.num_ranks

    def tell_all(self, value: T, timeout: timedelta) -> list[T]:
        """The values, such as JSON holds, of all ranks of all worlds, before their work begins.

        Collective over all ranks of all worlds.
        """
        if self._meeting is None:
            return [value]
        num = self.num_worlds * self.num_ranks
        self._num_told += 1
        key = f"told {self._num_told} by "
        try:
            self._meeting.set(f"{key}{self.first + self.rank}", json.dumps(value))
            keys = [f"{key}{rank}" for rank in range(num)]
            self._await(keys, timeout)
            return [json.loads(self._meeting.get(each)) for each in keys]
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"rank {self.first + self.rank} of {num} did not meet the others: a rank died or "
                f"was not started ({str(error).partition(chr(10))[0]})"
            ) from error

    def _await(self, keys: list[str], timeout: timedelta) -> None:
        """Returns when all have told; raises if one has failed, or it is too late."""
        assert self._meeting is not None
        until = time.monotonic() + timeout.total_seconds()
        while not self._meeting.check(keys):
            if self._meeting.check([_FAILED]):
                raise CommError(self._meeting.get(_FAILED).decode())
            if time.monotonic() > until:
                raise CommError(
                    f"rank {self.first + self.rank} did not meet the others within "
                    f"{timeout.total_seconds():g} s: a rank died or was not started"
                )
            time.sleep(LOOK_SECONDS)

    def fail(self, why: str) -> None:
        """Has those who wait for this rank, or will, raise too."""
        if self._meeting is not None:
            with suppress(RuntimeError):  # the process that keeps the store is gone
                rank = self.first + self.rank
                self._meeting.set(_FAILED, f"rank {rank} stopped, and so do all: {why}")

    def close(self) -> None:
        """Leaves the world: what was the default process group before is it again.

        Meshes of this world are of no more use.
        """
        mine = [group for group in known_groups() if group not in self._before]
        if join.current_world() is not self:
            return
        join.set_world(None)
        join.close_sockets()
        forget_groups()
        forget_placements()
        if self._outer is None and dist.is_initialized():
            dist.destroy_process_group()
        else:
            swap_world(self._outer)
            for group in mine:
                dist.destroy_process_group(group)
        join.put_back_sockets(self._sockets)
        gc.collect()  # joins gloo's threads


def split_ranks(num_worlds: int, *, what: str, timeout_seconds: float) -> World:
    """Cuts all ranks into ``num_worlds`` worlds of equally many, which follow each other.

    ``hyperslab.init`` then makes meshes of this rank's world. ``what`` names the number in errors.

    Collective over all ranks.
    """
    if join.current_world() is not None:
        raise ConfigError("ranks that are cut into worlds cannot be cut again: close them first")
    launch, timeout = find_launch(), timedelta(seconds=timeout_seconds)
    is_initialized = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_initialized else launch.rank
    num_ranks = dist.get_world_size() if is_initialized else launch.num_ranks
    size = ranks_each(num_ranks, num_worlds, what)
    number, mine = divmod(rank, size)
    here = replace(launch, rank=mine, num_ranks=size)
    meeting: Store | None = None
    if num_ranks > 1:
        store = default_store() if is_initialized else _start_store(launch, timeout)
        meeting = PrefixStore(f"hyperslab worlds {next(_numbers)}", store)
    world = World(number, num_worlds, here, number * size, meeting)
    listener = _listener(timeout) if mine == 0 and size > 1 else None
    address = (_address_of(launch), int(listener.port)) if listener else ("", 0)
    told = world.tell_all(address, timeout)
    world._before, world._sockets = frozenset(known_groups()), join.put_aside_sockets()
    world._outer = swap_world(None) if is_initialized else None
    forget_placements()
    if size > 1:
        host, port = told[world.first]
        join.set_world(world, listener or TCPStore(host, port, size, timeout=timeout))
    else:
        join.set_world(world)
    return world


def ranks_each(num_ranks: int, num_worlds: int, what: str) -> int:
    """The ranks of each world; raises where they cannot be equally many."""
    if num_worlds < 1 or num_ranks % num_worlds:
        below = num_ranks // num_worlds * num_worlds if num_worlds > 0 else 0
        near = " or ".join(str(n) for n in (below, below + num_worlds) if n > 0)
        raise ConfigError(
            f"{num_ranks} rank{'s' * (num_ranks != 1)} cannot be divided evenly among {what} = "
            f"{num_worlds}: start {near or 'more'} ranks, or change the number"
        )
    return num_ranks // num_worlds


def _start_store(launch: Launch, timeout: timedelta) -> Store:
    """Where all ranks find each other."""
    if not _start_stores:
        _start_stores.append(join.find_store(launch, timeout))
    return _start_stores[0]


def _listener(timeout: timedelta) -> TCPStore:
    """A store that this process keeps, at a free port of all its addresses."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def _address_of(launch: Launch) -> str:
    """Where others reach this host: by the way that leads to rank 0."""
    addr, port = launch.master_addr, launch.master_port
    if addr is None or port is None or launch.num_local_ranks == launch.num_ranks:
        return "127.0.0.1"
    try:
        with closing(socket.create_connection((addr, port), timeout=join.ANSWER_SECONDS)) as way:
            return str(way.getsockname()[0])
    except OSError:
        return socket.gethostname()


def open_store(timeout: timedelta) -> tuple[TCPStore, tuple[str, int]]:
    """A store of this process, and where others find it."""
    store = _listener(timeout)
    return store, (_address_of(find_launch()), int(store.port))


def pair_mesh(
    address: Sequence[Any], name: str, rank: int, num_ranks: int, timeout: timedelta
) -> Mesh:
    """Ranks of two worlds as one mesh of CPUs, for messages of host memory alone.

    They meet at the store at ``address`` under a ``name`` that is used once.

    Collective over these ranks.
    """
    with contact_between_worlds():
        host, port = address
        store = PrefixStore(name, TCPStore(host, port, is_master=False, timeout=timeout))
        group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, timeout)
    grid = read_grid({"sample": num_ranks, **dict.fromkeys(AXES[1:], 1)}, num_ranks)
    groups = {frozenset({"sample"}): group}
    return Mesh(grid, rank, torch.device("cpu"), "gloo", timeout, _groups=groups)


@contextmanager
def contact_between_worlds() -> Iterator[None]:
    """Turns torch's error that ranks of another world cannot be reached into a ``CommError``."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise CommError(f"the ranks of the other trainer are gone, or late ({why})") from error
