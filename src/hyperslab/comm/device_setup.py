"""How ranks of one node come to reach each other's GPU memory, or learn why they cannot."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hyperslab.comm.device_transport import (
    DeviceTransport,
    SharedMemory,
    shared_nbytes,
    slot_nbytes_for,
)
from hyperslab.comm.failure_report import contact
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.layout import Box, Message
from hyperslab.torch_private import make_symmetric_memory, share_symmetric_memory

_log = logging.getLogger("hyperslab")

Told = TypeVar("Told")

TRIAL_SECONDS = 60.0
"""How long the first exchange may take: kernels are compiled for it."""
NUM_TIMED = 8
"""Exchanges that are timed where ranks share a GPU."""
SLOW_SECONDS = 1e-3
"""Of an exchange: ranks that take turns on a GPU need twice as long, others a tenth."""
_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The variable that lets torch share memory between ranks of one GPU."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Place(NamedTuple):
    """What a rank tells the others of where it is."""

    node: tuple[str, str]
    """The name of the host, and what is drawn anew when it boots."""
    gpu: str
    obstacle: str
    """Why this rank can have no device transport, if it cannot."""


class Refusal(NamedTuple):
    """Why ranks have no device transport."""

    why: str
    is_normal: bool
    """Whether nothing is amiss: ranks are on CPUs or on several nodes."""


_opened: list[tuple[object, tuple[Place, ...], DeviceTransport | Refusal]] = []
"""By process group and places; all meshes of a process use one. The same on all ranks."""


def find_transport(mesh: Mesh, places: Sequence[Place], *, must: bool) -> DeviceTransport | None:
    """The device transport between all ranks of ``mesh``, which are in ``places``, or None.

    Where it ``must`` be had, ``ConfigError`` on all ranks if it cannot; else a line in the log of
    rank 0 says why. Collective over all ranks.
    """
    world, key = dist.group.WORLD, tuple(places)
    _opened[:] = [each for each in _opened if each[0] is world]
    found = next((each for _, theirs, each in _opened if theirs == key), None)
    if found is None:
        found = _obstacle(places) or _open(places, mesh)
        _opened.append((world, key, found))
        if isinstance(found, Refusal) and not must and mesh.rank == 0:
            level = logging.INFO if found.is_normal else logging.WARNING
            _log.log(
                level, "messages go by %s, not on the GPUs alone: %s", mesh.messages_by, found.why
            )
    if isinstance(found, DeviceTransport):
        return found
    if must:
        raise refused(found.why)
    return None


def forget_transports() -> None:
    """Lets go of the memory that ranks share."""
    _opened.clear()


def refused(why: str) -> ConfigError:
    """The error for ranks that ask for the device transport and cannot have it."""
    return ConfigError(
        f"transport='device' needs GPUs of one node that reach each other's memory ({why}); leave "
        "transport='auto'"
    )


def find_place(device: torch.device) -> Place:
    """Where this rank is."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    node = socket.gethostname(), boot
    if device.type != "cuda":
        return Place(node, "", f"its device is {device}, not a GPU")
    gpu = _gpu_id(device.index)
    return Place(node, gpu, "" if find_spec("triton") else "it has no triton")


def has_mps() -> bool:
    """Whether NVIDIA's MPS daemon runs where processes of this environment look for it."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return (Path(folder) / "control").exists()


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _obstacle(places: Sequence[Place]) -> Refusal | None:
    for rank, place in enumerate(places):
        if place.obstacle:
            is_normal = not any(each.gpu for each in places)
            return Refusal(f"rank {rank}: {place.obstacle}", is_normal)
        if place.node != places[0].node:
            first, other = places[0].node[0], place.node[0]
            return Refusal(f"rank 0 is on node {first}, rank {rank} on another, {other}", True)
    return None


def _open(places: Sequence[Place], mesh: Mesh) -> DeviceTransport | Refusal:
    """Shares memory and tries it. What fails on one rank, no rank has."""
    num_sharing = max(Counter(place.gpu for place in places).values())
    slot_nbytes = slot_nbytes_for(mesh.num_ranks)
    made: list[DeviceTransport] = []
    own: list[torch.Tensor] = []

    def allocate() -> str:
        own.append(make_symmetric_memory(shared_nbytes(mesh.num_ranks, slot_nbytes), mesh.device))
        own[0].zero_()
        _synchronize(mesh.device)
        return _unreachable(places, mesh)

    def share() -> str:
        with _overlapping(num_sharing > 1):
            memory = SharedMemory(own[0], *share_symmetric_memory(own[0], mesh.group))
        made.append(DeviceTransport(memory, mesh.rank, slot_nbytes, num_sharing))
        return ""

    def try_it() -> str:
        return _trial(made[0], mesh) or (_time(made[0], mesh) if num_sharing > 1 else "")

    # Each in turn: a rank that fails must not let the others wait in the next.
    for step in (allocate, share, try_it):
        for rank, error in enumerate(_gather(_attempt(step), mesh)):
            if error:
                return Refusal(f"rank {rank}: {error}", False)
    return made[0]


def _attempt(step: Callable[[], str]) -> str:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - of torch, Triton or a compiler; all go another way
        return str(error).partition("\n")[0] or type(error).__name__


def _unreachable(places: Sequence[Place], mesh: Mesh) -> str:
    """Which other rank's memory this rank's GPU cannot reach, as far as the driver tells."""
    if mesh.device.type != "cuda":
        return ""
    seen = {_gpu_id(index): index for index in range(torch.cuda.device_count())}
    own = places[mesh.rank].gpu
    for rank, place in enumerate(places):
        other = seen.get(place.gpu)
        if place.gpu == own or other is None:
            continue
        if not torch.cuda.can_device_access_peer(seen[own], other):
            return f"its GPU cannot reach the memory of that of rank {rank}"
    return ""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _overlapping(share: bool) -> Iterator[None]:
    before = os.environ.get(_SHARE)
    if share:
        os.environ[_SHARE] = "1"
    try:
        yield
    finally:
        if share and before is None:
            del os.environ[_SHARE]


def _trial(transport: DeviceTransport, mesh: Mesh) -> str:
    """What went wrong as every rank sent its number to every other, if anything."""
    peers = [rank for rank in range(mesh.num_ranks) if rank != mesh.rank]
    messages = [Message(peer, Box.of((0, 1)), (slice(0, 1),), 0) for peer in peers]
    mine = torch.full((1,), mesh.rank, device=mesh.device)
    limit = int(min(TRIAL_SECONDS, mesh.timeout.total_seconds()) * 1e9)
    try:
        pending = transport.post_pieces([mine] * len(peers), messages, messages, mine.dtype, limit)
        received = [int(box) for box in pending.wait()]
        transport.check()
    except (RuntimeError, TimeoutError) as error:
        return f"a first exchange failed: {error}"
    wrong = [peer for peer, number in zip(peers, received, strict=True) if peer != number]
    return f"a first exchange brought wrong numbers from ranks {wrong}" if wrong else ""


def _time(transport: DeviceTransport, mesh: Mesh) -> str:
    """As ``_trial``, some more times; a line in the log of rank 0 says if they are slow."""
    begun = time.perf_counter()
    for _ in range(NUM_TIMED):
        if error := _trial(transport, mesh):
            return error
    seconds = (time.perf_counter() - begun) / NUM_TIMED
    if seconds > SLOW_SECONDS and not has_mps() and mesh.rank == 0:
        _log.warning(
            "ranks share a GPU and take turns on it, %.1f ms for an exchange: start NVIDIA's MPS "
            "before them (nvidia-cuda-mps-control -d), and it is some 50 times faster",
            seconds * 1e3,
        )
    return ""


def _gather(mine: Told, mesh: Mesh) -> list[Told]:
    told = [mine] * mesh.num_ranks
    with contact("opening the device transport", mesh):
        dist.all_gather_object(told, mine, group=mesh.group)
    return told
