"""``hyperslab.init``: how ranks find each other and become a mesh.

Rank 0 listens at an address, and the others go there.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from hyperslab.comm.device_setup import (
    Place,
    find_place,
    find_transport,
    forget_transports,
    refused,
)
from hyperslab.comm.failure_report import contact, publish_report
from hyperslab.comm.launch import Launch, find_launch, how_to_set
from hyperslab.comm.local_sockets import LocalSockets, connect
from hyperslab.comm.mesh import Mesh, forget_groups, read_grid
from hyperslab.errors import CommError, ConfigError
from hyperslab.kernels.conv_check import describe, find_wrong
from hyperslab.kernels.torch_conv import avoid
from hyperslab.layout import AXES, Grid
from hyperslab.trace import active

TRANSPORTS = ("auto", "device", "nccl", "host")
MOST_SECONDS = 10**7
"""Of patience; torch counts milliseconds."""
ANSWER_SECONDS = 10.0
"""How long what listens at rank 0's address may take to answer as rank 0 would."""


def init(
    *,
    sample: int | None = None,
    channel: int = 1,
    depth: int = 1,
    height: int = 1,
    width: int = 1,
    device: str | torch.device | None = None,
    timeout_seconds: float = 600.0,
    transport: str = "auto",
) -> Mesh:
    """The mesh of all ranks with the given number of them along each axis.

    ``sample``, left out or -1, takes the ranks that the other axes leave. Starts
    ``torch.distributed`` where torchrun, srun or mpirun started several processes; uses a process
    group that is already there; alone, needs none. May be called again for another mesh over the
    same ranks.

    ``transport`` says how boxes such as halos travel: ``device`` by kernels that write into the
    memory of other GPUs of the same node, also where ranks share a GPU, and the host waits for
    nothing; ``nccl`` by NCCL; ``host`` by gloo through host memory. ``auto`` is the first of these
    that all ranks can use, or gloo on CPUs, with sockets for small messages within a node; where
    ranks of one node have GPUs and cannot use ``device``, a line in the log of rank 0 says why. One
    rank sends no messages: ``device`` is then allowed on a GPU, so that a program need not ask how
    many ranks it has.

    A rank that waits longer than ``timeout_seconds`` for another raises ``CommError``.

    Collective over all ranks.
    """
    launch = _launch()
    num_ranks = dist.get_world_size() if dist.is_initialized() else launch.num_ranks
    asked = (sample, channel, depth, height, width)
    grid = read_grid(dict(zip(AXES, asked, strict=True)), num_ranks)
    if not 0 < timeout_seconds <= MOST_SECONDS:
        raise ConfigError(
            f"timeout_seconds must be above 0 and at most {MOST_SECONDS}, got {timeout_seconds}"
        )
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    timeout = timedelta(seconds=timeout_seconds)
    place = _device(device, launch)
    wrong = find_wrong(place)
    if num_ranks == 1:
        if transport == "device" and place.type != "cuda":
            raise refused(f"the one rank's device is {place}, not a GPU")
        _avoid(wrong, place, tell=True)
        return Mesh(grid, 0, place, None, timeout)
    backend = _backend(place, launch, transport)
    if not dist.is_initialized():
        _join_ranks(launch, backend, timeout)
        atexit.register(_leave, backend)
    mesh = Mesh(grid, dist.get_rank(), place, backend, timeout)
    active.note_rank(mesh.rank)
    places = _meet(mesh, wrong, transport)
    if transport in ("nccl", "host"):
        return mesh
    if found := find_transport(mesh, places, must=transport == "device"):
        return replace(mesh, transport=found, sockets=_sockets(mesh))
    return replace(mesh, sockets=_sockets(mesh)) if place.type == "cpu" else mesh


# A world of some of the ranks; see ``worlds``


class RanksOfWorld(Protocol):
    """The ranks that ``init`` makes meshes of."""

    @property
    def launch(self) -> Launch:
        """As if they were all."""


@dataclass
class _Current:
    """The world that this rank is in, if it is not that of all ranks, and its store."""

    world: RanksOfWorld | None = None
    store: Store | None = None


_current = _Current()


def current_world() -> RanksOfWorld | None:
    return _current.world


def set_world(world: RanksOfWorld | None, store: Store | None = None) -> None:
    """Has ``init`` make meshes of that world, whose ranks meet at ``store``; None: of all ranks."""
    _current.world, _current.store = world, store


def _launch() -> Launch:
    return find_launch() if _current.world is None else _current.world.launch


_connected: list[tuple[object, LocalSockets | None]] = []
"""By process group; all meshes of a process use the same sockets."""


def _sockets(mesh: Mesh) -> LocalSockets | None:
    """Those between the ranks of a node. Collective over all ranks."""
    world = dist.group.WORLD
    if not _connected or _connected[0][0] is not world:
        close_sockets()

        def tell_all(value: object) -> list[object]:
            told = [value] * mesh.num_ranks
            dist.all_gather_object(told, value, group=mesh.group)
            return told

        with contact("connecting to the ranks of its node", mesh):
            _connected[:] = [(world, connect(mesh.rank, tell_all))]
    return _connected[0][1]


def put_aside_sockets() -> list[tuple[object, LocalSockets | None]]:
    """Those of the process group that was the default one, for ``put_back_sockets``."""
    aside = [*_connected]
    _connected.clear()
    return aside


def put_back_sockets(aside: Sequence[tuple[object, LocalSockets | None]]) -> None:
    _connected[:] = aside


def close_sockets() -> None:
    while _connected:
        _, sockets = _connected.pop()
        if sockets is not None:
            sockets.close()


def _device(device: str | torch.device | None, launch: Launch) -> torch.device:
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device!r} was asked for, but torch finds no usable GPU")
        if str(place) == "cuda":
            place = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    return place


def _backend(device: torch.device, launch: Launch, transport: str) -> str:
    """NCCL where every rank of the node has a GPU of its own, else gloo."""
    own_gpu = device.type == "cuda" and launch.num_local_ranks <= torch.cuda.device_count()
    has_nccl = own_gpu and dist.is_nccl_available()
    if transport == "nccl" and not has_nccl:
        raise ConfigError(
            "transport='nccl' needs a torch with NCCL and a GPU for every rank of a node; leave "
            "transport='auto'"
        )
    return "cpu:gloo,cuda:nccl" if has_nccl and transport != "host" else "gloo"


def _leave(backend: str) -> None:
    """Destroys the process group at exit, without which gloo aborts many a process at its end.

    Not NCCL's after an error: it may wait for the others, who wait for this rank to be gone.
    """
    if not dist.is_initialized():
        return
    if error := getattr(sys, "last_value", None):
        publish_report(dist.get_rank(), f"{type(error).__name__}: {error}")
    if backend == "gloo" or not error:
        forget_transports()
        close_sockets()
        dist.destroy_process_group()
        forget_groups()
        gc.collect()  # joins gloo's threads while there is still an interpreter for them


class _Greeting(NamedTuple):
    """What a rank tells the others first."""

    sizes: tuple[int, ...]
    wrong: Sequence[str]
    transport: str
    place: Place


def _meet(mesh: Mesh, wrong: Sequence[str], transport: str) -> list[Place]:
    """Makes the group of all ranks, checks that they ask for the same mesh, tells where each is.

    NCCL wants all ranks in a communicator's first call; later messages are between neighbours.
    Kernels that are ``wrong`` on one rank are used by none: all shall compute alike.
    """
    mine = _Greeting(mesh.grid.sizes, wrong, transport, find_place(mesh.device))
    told = [mine] * mesh.num_ranks
    try:
        dist.all_gather_object(told, mine, group=mesh.group)
        if mesh.backend != "gloo":
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.group)
    except RuntimeError as error:
        raise CommError(
            f"rank {mesh.rank} did not meet the others within {mesh.timeout.total_seconds():g} s: "
            f"another rank died or raised an error ({_first_line(error)})"
        ) from error
    _avoid([name for each in told for name in each.wrong], mesh.device, tell=mesh.rank == 0)
    first = told[0]
    for rank, theirs in enumerate(told):
        if theirs.transport != first.transport:
            raise CommError(
                f"ranks ask for different transports: rank 0 for {first.transport!r}, rank {rank} "
                f"for {theirs.transport!r}"
            )
        if theirs.sizes != first.sizes:
            raise CommError(
                f"ranks ask for different meshes: rank 0 for {Grid(first.sizes).describe()}, rank "
                f"{rank} for {Grid(theirs.sizes).describe()}"
            )
    return [each.place for each in told]


def _avoid(wrong: Sequence[str], device: torch.device, *, tell: bool) -> None:
    if wrong:
        avoid(wrong, device, describe(device), tell=tell)


def _join_ranks(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Starts ``torch.distributed``.

    Collective over all ranks. A port in use stops all of them, each for the same reason: rank 0
    cannot listen there, and the others are not answered by what does.
    """
    try:
        if _current.store is None and _has_agent_store():
            os.environ.setdefault("MASTER_ADDR", launch.master_addr or "127.0.0.1")
            dist.init_process_group(backend, timeout=timeout)
            return
        dist.init_process_group(
            backend,
            store=_current.store or find_store(launch, timeout),
            rank=launch.rank,
            world_size=launch.num_ranks,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise CommError(
            f"rank {launch.rank} of {launch.num_ranks} did not meet the others at {_place(launch)} "
            f"within {timeout.total_seconds():g} s: a rank died, raised an error or was not "
            f"started, or the address cannot be reached ({_first_line(error)})"
        ) from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _has_agent_store() -> bool:
    """Whether torchrun's agent listens, so that rank 0 does not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_store(launch: Launch, timeout: timedelta) -> Store:
    """The store of all ranks, which rank 0 keeps, or torchrun's agent.

    Collective over all ranks.
    """
    if _has_agent_store():
        assert launch.master_port is not None
        return TCPStore(launch.master_addr or "127.0.0.1", launch.master_port, timeout=timeout)
    return _listen(launch, timeout) if launch.rank == 0 else _find_rank_0(launch, timeout)


def _listen(launch: Launch, timeout: timedelta) -> TCPStore:
    try:
        return _store(launch, timeout)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise _port_in_use(launch, "rank 0 cannot listen there") from error


def _find_rank_0(launch: Launch, timeout: timedelta) -> TCPStore:
    """The store of rank 0, which may not listen yet.

    Torch waits without end for the answer of what is no store, so another thread does that.
    """
    found: list[TCPStore] = []
    errors: list[RuntimeError] = []

    def find() -> None:
        try:
            found.append(_store(launch, timeout))
        except RuntimeError as error:
            errors.append(error)

    finder = threading.Thread(target=find, name="hyperslab-join", daemon=True)
    finder.start()
    finder.join(ANSWER_SECONDS)
    listens = False
    while finder.is_alive():
        if listens:
            raise _port_in_use(launch, "what listens there does not answer as rank 0 would")
        listens = _listens(launch)
        finder.join(ANSWER_SECONDS)
    if errors:
        raise errors[0]
    return found[0]


def _store(launch: Launch, timeout: timedelta) -> TCPStore:
    assert launch.master_addr is not None
    assert launch.master_port is not None
    return TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.num_ranks,
        is_master=launch.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _listens(launch: Launch) -> bool:
    """Whether anyone does at the address where rank 0 should."""
    try:
        address = (launch.master_addr, launch.master_port)
        with closing(socket.create_connection(address, timeout=ANSWER_SECONDS)):
            return True
    except OSError:
        return False


def _port_in_use(launch: Launch, how: str) -> ConfigError:
    return ConfigError(
        f"port {launch.master_port} of {launch.master_addr} is in use by another program, often an "
        f"earlier run that has not ended: {how}; end that program, or set MASTER_PORT to a free "
        f"port{how_to_set(launch)}"
    )


def _place(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"
