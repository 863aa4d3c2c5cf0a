"""The ranks as a mesh with named axes, and how they come together."""

from __future__ import annotations

import atexit
import gc
import itertools
import math
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hyperslab.comm.groups import forget_groups, group_of
from hyperslab.comm.join import first_line, join_ranks
from hyperslab.comm.journal import journal
from hyperslab.comm.last_words import leave_words
from hyperslab.comm.launch import Launch, find_launch
from hyperslab.errors import CommError, ConfigError
from hyperslab.kernels.conv_check import describe, find_wrong
from hyperslab.kernels.torch_conv import avoid
from hyperslab.layout import AXES, Grid

_meshes: weakref.WeakValueDictionary[int, Mesh] = weakref.WeakValueDictionary()
_numbers = itertools.count()

MOST_SECONDS = 10**7
"""Of patience; torch counts milliseconds."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """The grid of ranks as this rank sees it, and the process groups along its axes.

    Without a process group (one process) nothing here talks to anyone.
    """

    grid: Grid
    rank: int
    device: torch.device
    backend: str | None
    """What carries messages: None alone, else ``gloo`` or ``cpu:gloo,cuda:nccl``."""
    timeout: timedelta
    batch_stats: str = "global"
    """Whether BatchNorm's statistics are of the global batch or of one ``spatial`` group."""
    _groups: dict[frozenset[str], ProcessGroup] = field(default_factory=dict, repr=False)

    number: ClassVar[int]
    """Of this very mesh in this process; see ``mesh_of``."""

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    @cached_property
    def coords(self) -> Mapping[str, int]:
        """This rank's coords, by axis name."""
        return self.grid.coords[self.rank]

    @cached_property
    def stages_through_host(self) -> bool:
        """Whether messages between CUDA tensors go through host memory.

        gloo cannot send CUDA tensors, and NCCL refuses ranks that share a GPU.
        """
        return self.device.type == "cuda" and self.backend == "gloo"

    @cached_property
    def group(self) -> ProcessGroup:
        """All ranks."""
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

    def __str__(self) -> str:
        return f"Mesh({self.grid.describe()}, rank {self.rank} of {self.num_ranks}, {self.device})"


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


def init(
    *,
    sample: int | None = None,
    channel: int = 1,
    depth: int = 1,
    height: int = 1,
    width: int = 1,
    device: str | torch.device | None = None,
    timeout_seconds: float = 600.0,
) -> Mesh:
    """The mesh of all ranks with the given number of them along each axis.

    ``sample``, left out or -1, takes the ranks that the other axes leave. Starts
    ``torch.distributed`` where torchrun, srun or mpirun started several processes; uses a process
    group that is already there; alone, needs none. May be called again for another mesh over the
    same ranks.

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
    timeout = timedelta(seconds=timeout_seconds)
    place = _device(device, launch)
    wrong = find_wrong(place)
    if num_ranks == 1:
        _avoid(wrong, place, tell=True)
        return Mesh(grid, 0, place, None, timeout)
    backend = _backend(place, launch)
    if not dist.is_initialized():
        join_ranks(launch, backend, timeout)
        atexit.register(_leave, backend)
    mesh = Mesh(grid, dist.get_rank(), place, backend, timeout)
    _meet(mesh, wrong)
    return mesh


def _grid(asked: Mapping[str, int | None], num_ranks: int) -> Grid:
    """The grid that was asked for, checked: every rank knows the same numbers and raises alike."""
    for axis, size in asked.items():
        free = axis == "sample" and (size is None or size == -1)
        if not free and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"axis {axis} must have at least 1 rank, got {size!r}")
    sizes = {axis: size for axis, size in asked.items() if size is not None and size != -1}
    product = math.prod(sizes.values())
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1"
    if "sample" not in sizes:
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
        leave_words(dist.get_rank(), f"{type(error).__name__}: {error}")
    if backend == "gloo" or not error:
        dist.destroy_process_group()
        for mesh in _meshes.values():
            mesh._groups.clear()
            mesh.__dict__.pop("group", None)
        forget_groups()
        gc.collect()  # joins gloo's threads while there is still an interpreter for them


def _meet(mesh: Mesh, wrong: Sequence[str]) -> None:
    """Makes the group of all ranks and checks that they ask for the same mesh.

    NCCL wants all ranks in a communicator's first call; later messages are between neighbours.
    Kernels that are ``wrong`` on one rank are used by none: all shall compute alike.
    """
    told: list[tuple[tuple[int, ...], Sequence[str]]] = [((), ())] * mesh.num_ranks
    try:
        dist.all_gather_object(told, (mesh.grid.sizes, wrong), group=mesh.group)
        if mesh.backend != "gloo":
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.group)
    except RuntimeError as error:
        raise CommError(
            f"rank {mesh.rank} did not meet the others within {mesh.timeout.total_seconds():g} s: "
            f"another rank died or raised an error ({first_line(error)})"
        ) from error
    sizes = [theirs for theirs, _ in told]
    _avoid([name for _, names in told for name in names], mesh.device, tell=mesh.rank == 0)
    for rank, theirs in enumerate(sizes):
        if theirs != sizes[0]:
            raise CommError(
                f"ranks ask for different meshes: rank 0 for {Grid(sizes[0]).describe()}, rank "
                f"{rank} for {Grid(theirs).describe()}"
            )


def _avoid(wrong: Sequence[str], device: torch.device, *, tell: bool) -> None:
    if wrong:
        avoid(wrong, device, describe(device), tell=tell)
