"""``hyperslab.init``: how ranks find each other and become a mesh.

Rank 0 listens at an address, and the others go there.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from hyperslab.comm.device_setup import check_single_rank, forget_transports, open_transport
from hyperslab.comm.failure_report import publish_report
from hyperslab.comm.launch import Launch, find_launch, how_to_set
from hyperslab.comm.mesh import Mesh, forget_groups
from hyperslab.errors import CommError, ConfigError
from hyperslab.kernels.conv_check import describe, find_wrong
from hyperslab.kernels.torch_conv import avoid
from hyperslab.layout import AXES, Grid

TRANSPORTS = ("auto", "device", "host")
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

    ``transport`` says how boxes such as halos travel: ``auto`` by NCCL or gloo, ``host`` by gloo
    through host memory, ``device`` by kernels that write into the memory of other GPUs of the same
    node, also where ranks share a GPU; the host then waits for nothing.

    A rank that waits longer than ``timeout_seconds`` for another raises ``CommError``.

    Collective over all ranks.
    """
    launch = find_launch()
    num_ranks = dist.get_world_size() if dist.is_initialized() else launch.num_ranks
    asked = (sample, channel, depth, height, width)
    grid = _grid(dict(zip(AXES, asked, strict=True)), num_ranks)
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
        if transport == "device":
            check_single_rank(place)
        _avoid(wrong, place, tell=True)
        return Mesh(grid, 0, place, None, timeout)
    backend = "gloo" if transport == "host" else _backend(place, launch)
    if not dist.is_initialized():
        _join_ranks(launch, backend, timeout)
        atexit.register(_leave, backend)
    mesh = Mesh(grid, dist.get_rank(), place, backend, timeout)
    _meet(mesh, wrong, transport)
    return replace(mesh, transport=open_transport(mesh)) if transport == "device" else mesh


def _grid(asked: Mapping[str, int | None], num_ranks: int) -> Grid:
    """The grid that was asked for, checked: every rank knows the same numbers and raises alike."""
    for axis, size in asked.items():
        free = axis == "sample" and (size is None or size == -1)
        if not free and (type(size) is bool or not isinstance(size, int) or size < 1):
            raise ConfigError(f"axis {axis} must have at least 1 rank, got {size!r}")
    sizes = {axis: size for axis, size in asked.items() if size is not None and size != -1}
    product = math.prod(sizes.values())
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1"
    if "sample" not in sizes:
        if num_ranks == 1 < product:
            raise ConfigError(
                f"a mesh of {shown} needs {product} ranks, but there is 1: start {product}, as by "
                f"torchrun --nproc-per-node {product}"
            )
        if num_ranks % product:
            raise ConfigError(
                f"{num_ranks} ranks cannot be spread over {shown}: {num_ranks} is not a multiple "
                f"of {product}"
            )
        sizes["sample"] = num_ranks // product
    elif product != num_ranks:
        are = "is" if num_ranks == 1 else "are"
        raise ConfigError(
            f"a mesh of {shown} needs {product} ranks, but there {are} {num_ranks}: change the "
            f"axes, or start {product} processes (torchrun --nproc-per-node {product} ...)"
        )
    return Grid(tuple(sizes[axis] for axis in AXES))


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


def _backend(device: torch.device, launch: Launch) -> str:
    """NCCL where every rank of the node has a GPU of its own, else gloo."""
    own_gpu = device.type == "cuda" and launch.num_local_ranks <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if own_gpu and dist.is_nccl_available() else "gloo"


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
        dist.destroy_process_group()
        forget_groups()
        gc.collect()  # joins gloo's threads while there is still an interpreter for them


def _meet(mesh: Mesh, wrong: Sequence[str], transport: str) -> None:
    """Makes the group of all ranks and checks that they ask for the same mesh.

    NCCL wants all ranks in a communicator's first call; later messages are between neighbours.
    Kernels that are ``wrong`` on one rank are used by none: all shall compute alike.
    """
    told: list[tuple[tuple[int, ...], Sequence[str], str]] = [((), (), "")] * mesh.num_ranks
    try:
        dist.all_gather_object(told, (mesh.grid.sizes, wrong, transport), group=mesh.group)
        if mesh.backend != "gloo":
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.group)
    except RuntimeError as error:
        raise CommError(
            f"rank {mesh.rank} did not meet the others within {mesh.timeout.total_seconds():g} s: "
            f"another rank died or raised an error ({_first_line(error)})"
        ) from error
    sizes = [theirs for theirs, _, _ in told]
    _avoid([name for _, names, _ in told for name in names], mesh.device, tell=mesh.rank == 0)
    for rank, (theirs, _, other) in enumerate(told):
        if other != told[0][2]:
            raise CommError(
                f"ranks ask for different transports: rank 0 for {told[0][2]!r}, rank {rank} for "
                f"{other!r}"
            )
        if theirs != sizes[0]:
            raise CommError(
                f"ranks ask for different meshes: rank 0 for {Grid(sizes[0]).describe()}, rank "
                f"{rank} for {Grid(theirs).describe()}"
            )


def _avoid(wrong: Sequence[str], device: torch.device, *, tell: bool) -> None:
    if wrong:
        avoid(wrong, device, describe(device), tell=tell)


def _join_ranks(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Starts ``torch.distributed``.

    Collective over all ranks. A port in use stops all of them, each for the same reason: rank 0
    cannot listen there, and the others are not answered by what does.
    """
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent listens
            os.environ.setdefault("MASTER_ADDR", launch.master_addr or "127.0.0.1")
            dist.init_process_group(backend, timeout=timeout)
            return
        dist.init_process_group(
            backend,
            store=_listen(launch, timeout) if launch.rank == 0 else _find_rank_0(launch, timeout),
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
