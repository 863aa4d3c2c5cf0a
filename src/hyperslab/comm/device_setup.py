"""How ranks of one node come to reach each other's GPU memory, or learn why they cannot."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
from hyperslab.torch_private import make_symmetric_memory

Told = TypeVar("Told")

TRIAL_SECONDS = 60.0
"""How long the first exchange may take: kernels are compiled for it."""
_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The variable that lets torch share memory between ranks of one GPU."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_opened: list[tuple[object, torch.device, DeviceTransport]] = []
"""By process group and device; all meshes of a process use one."""


class _Place(NamedTuple):
    """What ranks tell each other of where they are."""

    node: tuple[str, str]
    gpu: str
    obstacle: str


def open_transport(mesh: Mesh) -> DeviceTransport:
    """The device transport between all ranks of ``mesh``; ``ConfigError`` on all if there is none.

    Collective over all ranks.
    """
    world = dist.group.WORLD
    for group, device, transport in _opened:
        if group is world and device == mesh.device:
            return transport
    places = _gather(_place(mesh.device), mesh)
    if obstacle := _obstacle(places):
        raise _refusal(obstacle)
    transport = _open(places, mesh)
    _opened[:] = [(world, mesh.device, transport)]
    return transport


def check_single_rank(device: torch.device) -> None:
    """Raises ``ConfigError`` where ranks on ``device`` could have no device transport."""
    if obstacle := _obstacle([_place(device)]):
        raise _refusal(obstacle)


def forget_transports() -> None:
    """Lets go of the memory that ranks share."""
    _opened.clear()


def _place(device: torch.device) -> _Place:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    node = socket.gethostname(), boot
    if device.type != "cuda":
        return _Place(node, "", f"its device is {device}, not a GPU")
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    if find_spec("triton") is None:
        return _Place(node, gpu, "it has no triton")
    return _Place(node, gpu, "")


def _obstacle(places: Sequence[_Place]) -> str:
    for rank, place in enumerate(places):
        if place.obstacle:
            return f"rank {rank}: {place.obstacle}"
        if place.node != places[0].node:
            first, other = places[0].node[0], place.node[0]
            return f"rank 0 is on node {first}, rank {rank} on another, {other}"
    return ""


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"transport='device' needs GPUs of one node that reach each other's memory ({why}); leave "
        "transport='auto'"
    )


def _open(places: Sequence[_Place], mesh: Mesh) -> DeviceTransport:
    """Shares memory and tries it; raises on all ranks what failed on any."""
    num_sharing = max(Counter(place.gpu for place in places).values())
    slot_nbytes = slot_nbytes_for(mesh.num_ranks)
    transport, error = None, ""
    try:
        with _overlapping(num_sharing > 1):
            memory = _share(shared_nbytes(mesh.num_ranks, slot_nbytes), mesh)
        transport = DeviceTransport(memory, mesh.rank, slot_nbytes, num_sharing)
    except (RuntimeError, ImportError) as wrong:
        error = f"{str(wrong).partition(chr(10))[0] or type(wrong).__name__}"
    _raise_first(error, mesh)
    assert transport is not None
    _raise_first(_trial(transport, mesh), mesh)
    return transport


def _share(nbytes: int, mesh: Mesh) -> SharedMemory:
    own, addresses, keeper = make_symmetric_memory(nbytes, mesh.device, mesh.group)
    own.zero_()
    torch.cuda.synchronize(mesh.device)
    return SharedMemory(own, addresses, keeper)


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
        received = _numbers(pending.wait())
        transport.check()
    except (RuntimeError, TimeoutError) as error:
        return f"a first exchange failed: {error}"
    wrong = [peer for peer, number in zip(peers, received, strict=True) if peer != number]
    return f"a first exchange brought wrong numbers from ranks {wrong}" if wrong else ""


def _numbers(boxes: Sequence[Tensor]) -> list[int]:
    return [int(box) for box in boxes]


def _raise_first(error: str, mesh: Mesh) -> None:
    """Raises on all ranks if one of them brings an error. Collective over all ranks."""
    for rank, told in enumerate(_gather(error, mesh)):
        if told:
            raise _refusal(f"rank {rank}: {told}")


def _gather(mine: Told, mesh: Mesh) -> list[Told]:
    told = [mine] * mesh.num_ranks
    with contact("opening the device transport", mesh):
        dist.all_gather_object(told, mine, group=mesh.group)
    return told
