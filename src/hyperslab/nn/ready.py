"""Whether a module can be parallelized as it is."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError


def check_tensors(module: nn.Module) -> None:
    """Raises unless weights and buffers have shapes and values."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of a lazy module has no shape yet: run the module once on a small plain "
                "tensor, on every rank alike, before parallelize"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{name} is on the meta device, without values: call module.to_empty(device=...) "
                "and initialize the weights, or load them, before parallelize"
            )


def check_layers(module: nn.Module, mesh: Mesh) -> None:
    """Raises where a layer would talk to other ranks by itself."""
    if mesh.num_ranks == 1:
        return
    for name, layer in module.named_modules():
        if layer.training and isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the module'} is a SyncBatchNorm, which cannot run on split tensors: "
                "use BatchNorm, whose statistics are those of the global batch on any mesh"
            )
