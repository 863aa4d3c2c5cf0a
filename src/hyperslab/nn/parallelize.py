"""Any module, on any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from hyperslab.comm.agree import agree_on
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.nn.slab import Slab

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module, mesh: Mesh, *, shard_weights: bool = False, batch_stats: str = "global"
) -> Module:
    """``module`` itself, ready to run on Slabs: its ``forward`` is unchanged, its gradients averaged.

    Gradients are averaged over the ranks by DDP, or by FSDP2, which also spreads the weights, with
    ``shard_weights``. ``batch_stats="spatial"`` computes BatchNorm's statistics over the ranks that
    share a sample rather than over the global batch, as DDP users expect. Weights, buffers and torch's
    random state (dropout masks come from it) are those of rank 0. Keys of ``state_dict`` stay.

    Collective over the mesh.
    """
    if batch_stats not in ("global", "spatial"):
        raise ConfigError(f"batch_stats must be 'global' or 'spatial', got {batch_stats!r}")
    if isinstance(module, Parallel):
        raise ConfigError("the module is parallelized already")
    mesh = replace(mesh, batch_stats=batch_stats)
    module.to(mesh.device)
    replica = None
    if mesh.num_ranks > 1:
        agree_on("the module given to parallelize", _signature(module), mesh)
        _copy_from_rank_0(module, mesh)
        if shard_weights:
            _shard_weights(module, mesh)
        elif any(p.requires_grad for p in module.parameters()):
            replica = _replicate(module, mesh)
    _become_parallel(module, mesh, replica)
    return module


class Parallel:
    """What ``parallelize`` adds to a module's class, as FSDP2 adds to it."""

    _mesh: Mesh
    _replica: DistributedDataParallel | None

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(self._on_mesh, (args, kwargs))
        run = self._replica or super().forward  # type: ignore[misc]
        return run(*args, **kwargs)

    def _on_mesh(self, leaf: Any) -> Any:
        """A Slab argument with this module's settings, which travel with it to every layer."""
        return leaf.on(self._mesh) if isinstance(leaf, Slab) else leaf

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients accumulate on each rank and are not yet averaged."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(False)
        with self._replica.no_sync() if self._replica else nullcontext():
            yield
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(True)


class _Body(nn.Module):
    """The module as DDP sees it: its ``forward`` is that of the original class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._forward = type(module).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)


def _replicate(module: nn.Module, mesh: Mesh) -> DistributedDataParallel:
    # With global statistics buffers stay equal by themselves. init_sync has been done.
    return DistributedDataParallel(
        _Body(module), broadcast_buffers=mesh.batch_stats == "spatial", init_sync=False
    )


def _become_parallel(
    module: nn.Module, mesh: Mesh, replica: DistributedDataParallel | None
) -> None:
    """Gives ``module`` a class of its own that adds ``Parallel`` to it.

    The DDP wrapper is kept out of the module tree, so that it shows in no ``state_dict``.
    """
    cls = type(module)
    module.__dict__.update(_mesh=mesh, _replica=replica)
    module.__class__ = type(f"Parallel{cls.__name__}", (Parallel, cls), {})


def _signature(module: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]


def _copy_from_rank_0(module: nn.Module, mesh: Mesh) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, 0, group=mesh.group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)
    state = torch.get_rng_state()
    first = state.clone()
    dist.broadcast(first, 0, group=mesh.group)
    differs = torch.tensor([int(not torch.equal(state, first))])
    dist.all_reduce(differs, group=mesh.group)
    torch.set_rng_state(first)
    if int(differs) and mesh.rank == 0:
        warnings.warn(
            f"torch's random state differed between ranks and is now that of rank 0 on all: masks of "
            f"dropout must agree ({int(differs)} of {mesh.num_ranks} ranks were changed); seed all ranks alike",
            stacklevel=3,
        )


def _shard_weights(module: nn.Module, mesh: Mesh) -> None:
    """Spreads each layer's weights over all ranks, and what is left of the module's own."""
    over = init_device_mesh(mesh.device.type, (mesh.num_ranks,))
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=over)
    fully_shard(module, mesh=over)
