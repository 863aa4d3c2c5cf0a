"""The device transport without a GPU: its kernels are interpreted, its memory is the host's."""

import dataclasses
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hyperslab.comm.device_transport import DeviceTransport, SharedMemory, shared_nbytes
from hyperslab.comm.mesh import Mesh
from hyperslab.testing.triton_interpreter import use_triton_interpreter


def with_host_transport(mesh: Mesh, slot_nbytes: int, timeout_seconds: float = 100.0) -> Mesh:
    """``mesh``, on CPUs, whose ranks exchange by the device transport.

    Time is counted in polls of a word. Collective over all ranks.
    """
    use_triton_interpreter()
    memory = _memory_of_the_host(mesh, shared_nbytes(mesh.num_ranks, slot_nbytes))
    return dataclasses.replace(
        mesh,
        transport=DeviceTransport(memory, mesh.rank, slot_nbytes),
        timeout=timedelta(seconds=timeout_seconds),
    )


def _memory_of_the_host(mesh: Mesh, nbytes: int) -> SharedMemory:
    folder = [tempfile.mkdtemp() if mesh.rank == 0 else None]
    dist.broadcast_object_list(folder, group=mesh.group)
    assert folder[0] is not None
    files = [Path(folder[0]) / str(rank) for rank in range(mesh.num_ranks)]
    files[mesh.rank].write_bytes(bytes(nbytes))
    dist.barrier(group=mesh.group)
    maps = [torch.from_file(str(f), shared=True, size=nbytes, dtype=torch.uint8) for f in files]
    dist.barrier(group=mesh.group)
    files[mesh.rank].unlink()
    return SharedMemory(maps[mesh.rank], [each.data_ptr() for each in maps], maps)
