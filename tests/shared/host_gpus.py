"""The device transport without a GPU: by kernels that Triton interprets, in host memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from triton_interpreter import use_triton_interpreter

from hyperslab.comm import device_setup, join
from hyperslab.comm.device_setup import Place
from hyperslab.comm.device_transport import DeviceTransport
from hyperslab.kernels.exchange import Endpoint

POLL_NANOSECONDS = 2_000_000
"""What a look at the word of another rank takes at most, on a busy machine."""

_files: dict[int, str] = {}
"""Where memory that is yet to be shared lies, by its address."""


def make_host_memory(nbytes: int, device: torch.device | None = None) -> Tensor:
    """As ``make_symmetric_memory``, in a file."""
    number, name = tempfile.mkstemp(prefix="hyperslab-host-gpu-")
    os.close(number)
    memory = _map(name, nbytes)
    _files[memory.data_ptr()] = name
    return memory


def share_host_memory(memory: Tensor, group: dist.ProcessGroup) -> tuple[list[int], object]:
    """As ``share_symmetric_memory``. Collective over ``group``."""
    mine = _files.pop(memory.data_ptr())
    names = [mine] * group.size()
    dist.all_gather_object(names, mine, group=group)
    maps = [memory if name == mine else _map(name, memory.numel()) for name in names]
    dist.barrier(group=group)
    Path(mine).unlink()
    return [each.data_ptr() for each in maps], maps


class HostTransport(DeviceTransport):
    """One whose kernels have no clock: they count how often they look for another rank."""

    def _endpoint_within(self, limit: int) -> Endpoint:
        return super()._endpoint_within(limit // POLL_NANOSECONDS)


def _map(name: str, nbytes: int) -> Tensor:
    return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)


def use_host_gpus(*, shared: bool = False) -> None:
    """Has ``init`` on CPUs, from now on in this process, take them for GPUs, one for each rank.

    All ranks have the same one if it is ``shared``. To be called before anything of Triton is
    loaded.
    """
    use_triton_interpreter()

    def find_place(device: torch.device) -> Place:
        place = device_setup.find_place(torch.device("cpu"))
        return Place(place.node, "GPU 0" if shared else f"GPU {dist.get_rank()}", "")

    vars(join).update(find_place=find_place)
    vars(device_setup).update(
        make_symmetric_memory=make_host_memory,
        share_symmetric_memory=share_host_memory,
        DeviceTransport=HostTransport,
    )
