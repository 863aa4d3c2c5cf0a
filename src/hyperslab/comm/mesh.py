"""The ranks as a mesh with named axes, and the process groups along them."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hyperslab.comm.device_transport import DeviceTransport
from hyperslab.comm.journal import journal
from hyperslab.comm.local_sockets import LocalSockets
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES, Grid
from hyperslab.torch_private import untraced

_meshes: weakref.WeakValueDictionary[int, Mesh] = weakref.WeakValueDictionary()
_numbers = itertools.count()

Run = TypeVar("Run", bound=Callable[[], object])
Answer = TypeVar("Answer")


@dataclass
class _FirstMesh:
    """What is called when this process makes its first mesh."""

    is_made: bool = False
    calls: list[Callable[[], object]] = field(default_factory=list)

    def make(self) -> None:
        self.is_made = True
        while self.calls:
            self.calls.pop(0)()


_first_mesh = _FirstMesh()


@dataclass(frozen=True, eq=False)
class Mesh:
    """The grid of ranks as this rank sees it, and the process groups along its axes.

    Without a process group (one process) nothing here talks to anyone.
    """

    grid: Grid
    rank: int
    device: torch.device
    backend: str | None
    """What carries messages: None with one rank, else ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    timeout: timedelta
    batch_stats: str = "global"
    """Whether BatchNorm's statistics are of the global batch or of one ``spatial`` group."""
    transport: DeviceTransport | None = None
    """What carries boxes on the GPUs themselves, where that can be had."""
    sockets: LocalSockets | None = field(default=None, repr=False)
    """What carries small messages between hosts of one node."""
    _groups: dict[frozenset[str], ProcessGroup] = field(default_factory=dict, repr=False)
    _siblings: dict[tuple[Grid, str], Mesh] = field(default_factory=dict, repr=False)
    """Meshes of the same ranks for parts of a model, by their grids and ``batch_stats``."""

    number: ClassVar[int]
    """Of this very mesh in this process; see ``mesh_of``."""

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    @cached_property
    def coords(self) -> Mapping[str, int]:
        """This rank's coords, by axis name."""
        return self.grid.coords[self.rank]

    def ask_first(self, call: Callable[[], Answer]) -> Answer:
        """What ``call`` returns on rank 0, on all ranks; its error is raised on all of them.

        Collective over all ranks, in host memory.
        """
        from hyperslab.comm.side_channel import SideChannel, ask_first

        with closing(SideChannel(self, "asking rank 0")) as channel:
            return ask_first(call, channel)

    def tell_all(self, value: Answer) -> list[Answer]:
        """The values of all ranks, by rank. Collective over all ranks, in host memory."""
        from hyperslab.comm.side_channel import SideChannel

        with closing(SideChannel(self, "telling all ranks")) as channel:
            return channel.tell_all(value)

    @cached_property
    def stages_through_host(self) -> bool:
        """Whether messages between CUDA tensors go through host memory.

        gloo cannot send CUDA tensors, and NCCL refuses ranks that share a GPU.
        """
        return self.device.type == "cuda" and self.backend == "gloo"

    @property
    def messages_by(self) -> str:
        """How boxes such as halos travel, in words."""
        if self.num_ranks == 1:
            return "nothing"
        if self.transport is not None:
            return "kernels that write into the memory of other ranks"
        if self.stages_through_host:
            return "gloo through host memory"
        if self.backend != "gloo":
            return "NCCL"
        return "gloo" if self.sockets is None else "gloo, small ones within a node by sockets"

    @cached_property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        return self.group_over(AXES)

    def group_over(self, axes: Collection[str]) -> ProcessGroup:
        """The ranks whose coords differ from this rank's only along ``axes``.

        Collective over all ranks the first time it is asked for a set of axes.
        """
        key = frozenset(axes) & frozenset(self.grid.long_axes)
        if key not in self._groups:
            assert self.backend is not None
            partition = self.grid.groups(key)
            self._groups[key] = group_of(partition, self.rank, self.backend, self.timeout)
        return self._groups[key]

    def axes_beside(self, axes: Collection[str]) -> tuple[str, ...]:
        """The axes with several ranks that are not in ``axes``.

        A tensor that is split over ``axes`` is equal on the ranks along the others.
        """
        return tuple(axis for axis in self.grid.long_axes if axis not in axes)

    def recut(self, axes: Mapping[str, int]) -> Mesh:
        """The same ranks along other axes; ``sample``, left out, takes those that remain.

        Slabs of both may meet.
        """
        asked = {axis: axes.get(axis, None if axis == "sample" else 1) for axis in AXES}
        grid = read_grid(asked, self.num_ranks)
        self._siblings.setdefault((self.grid, self.batch_stats), self)
        found = self._siblings.get((grid, self.batch_stats))
        if found is None:
            found = replace(self, grid=grid, _groups={})
            self._siblings[grid, self.batch_stats] = found
        return found

    def is_sibling(self, other: Mesh) -> bool:
        """Whether one was made of the other by ``recut``, or both of a third."""
        return self._siblings is other._siblings

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """The ranks along ``axes``, in their order, as torch's DTensors know them.

        Collective over all ranks the first time.
        """
        key = self.grid, self.device.type, dist.group.WORLD
        if key not in _device_meshes:
            long = self.grid.long_axes
            ranks = torch.arange(self.num_ranks).view([self.grid.size(axis) for axis in long])
            with untraced():
                _device_meshes[key] = DeviceMesh(self.device.type, ranks, mesh_dim_names=long)
        whole = _device_meshes[key]
        found = whole if axes == whole.mesh_dim_names else whole[axes]
        _meshes_by_device_mesh.setdefault(found, self)
        return found

    def __deepcopy__(self, memo: object) -> Mesh:
        """Itself: process groups cannot be copied, nor need they be."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """As a pickle it is the mesh of the same grid and rank in the process that loads it."""
        return find_mesh, (self.grid, self.rank, self.batch_stats)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", next(_numbers))
        _meshes[self.number] = self
        journal.has_readers |= self.num_ranks > 1
        _first_mesh.make()

    def __str__(self) -> str:
        messages = f", messages by {self.messages_by}" if self.num_ranks > 1 else ""
        return (
            f"Mesh({self.grid.describe()}, rank {self.rank} of {self.num_ranks}, {self.device}"
            f"{messages})"
        )


def read_grid(asked: Mapping[str, int | None], num_ranks: int) -> Grid:
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


def with_first_mesh(run: Run) -> Run:
    """Has ``run`` called when this process makes its first mesh, or now if it has made one.

    It is for what changes torch: programs that import this package and make no mesh do not pay.
    """
    if _first_mesh.is_made:
        run()
    else:
        _first_mesh.calls.append(run)
    return run


def check_mesh(mesh: object) -> None:
    """Raises unless ``mesh`` is a Mesh."""
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"a mesh was expected, as hyperslab.init gives it, got {type(mesh).__name__}"
        )


def mesh_of(number: int) -> Mesh:
    """The mesh with that ``number``."""
    return _meshes[number]


def find_mesh(grid: Grid, rank: int, batch_stats: str) -> Mesh:
    """The newest mesh of this process with that ``grid``, on which it is that ``rank``."""
    alike = [m for m in list(_meshes.values()) if (m.grid, m.rank) == (grid, rank)]
    if not alike:
        here = sorted({f"rank {m.rank} of {m.grid.describe()}" for m in list(_meshes.values())})
        raise ConfigError(
            f"a pickle of rank {rank} of {grid.describe()} cannot be loaded here, on "
            f"{' and '.join(here) or 'no mesh'}: make the same mesh first and let each rank load "
            "what it saved, or save hyperslab.gather(x), which loads anywhere"
        )
    return max(alike, key=lambda mesh: (mesh.batch_stats == batch_stats, mesh.number))


_lock = threading.RLock()


@contextmanager
def one_thread(mesh: Mesh) -> Iterator[None]:
    """Has other threads that enter it raise ``ConfigError``; does nothing on one rank."""
    if mesh.num_ranks == 1:
        yield
        return
    if not _lock.acquire(blocking=False):
        raise ConfigError(
            f"two threads of rank {mesh.rank} run parallelized modules at once: their messages to "
            f"the other ranks ({mesh.num_ranks - 1}) would mix; let one wait for the other, in the "
            "same order on all ranks"
        )
    try:
        yield
    finally:
        _lock.release()


_device_meshes: dict[tuple[Grid, str, ProcessGroup | None], DeviceMesh] = {}
_meshes_by_device_mesh: dict[DeviceMesh, Mesh] = {}


def mesh_of_device_mesh(device_mesh: DeviceMesh) -> Mesh | None:
    """A mesh that gave ``device_mesh``, or an equal one: the same ranks then hold the same."""
    return _meshes_by_device_mesh.get(device_mesh)


_made: dict[tuple[object, ...], ProcessGroup] = {}
_made_for: list[ProcessGroup] = []


def group_of(
    partition: Iterable[tuple[int, ...]], rank: int, backend: str, timeout: timedelta
) -> ProcessGroup:
    """The group of the set of ranks in ``partition`` that ``rank`` belongs to.

    Collective over all ranks the first time: each makes all the groups of the partition, in the
    same order, as torch wants it. These groups carry only our messages, so that they cannot be
    mistaken for averages of gradients, by us or by FSDP, which run in the default group.
    """
    world = dist.group.WORLD
    assert world is not None
    if _made_for != [world]:
        _forget_made()
        _made_for[:] = [world]
    found = None
    for ranks in partition:
        key = (ranks, backend, timeout)
        if key not in _made:
            with untraced():
                _made[key] = dist.new_group(
                    list(ranks), timeout, backend, pg_options=_options(backend, timeout)
                )
        if rank in ranks:
            found = _made[key]
    assert found is not None
    return found


def _options(backend: str, timeout: timedelta) -> Any:
    """High priority for NCCL's stream: a halo must not queue behind the interior that hides it."""
    if "nccl" not in backend:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def forget_groups() -> None:
    """Lets go of all groups, of meshes too, so that they end with their last user."""
    for mesh in _meshes.values():
        mesh._groups.clear()
        mesh.__dict__.pop("group", None)
    _forget_made()


def _forget_made() -> None:
    """Of other process groups: their ranks may be the same, their sockets are not."""
    _made.clear()
    _made_for.clear()
    _device_meshes.clear()
    _meshes_by_device_mesh.clear()
