"""Whole weights, as a plain module has them, loaded into a module whose weights are spread."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def load_whole_weights(module: nn.Module) -> None:
    """Has ``load_state_dict`` of ``module``, or of a part of it, take whole tensors too."""
    for layer in module.modules():
        layer.register_load_state_dict_pre_hook(_take_parts)


def _take_parts(layer: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """Puts this rank's part in the place of each tensor that is whole where the layer's is not.

    Tensors of another shape stay as they are, for torch to name them.
    """
    for name, own in (*layer._parameters.items(), *layer._buffers.items()):
        given = state.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(given, Tensor):
            continue
        if not isinstance(given, DTensor) and given.shape == own.shape:
            given = given.detach().to(own.device)
            state[prefix + name] = distribute_tensor(
                given, own.device_mesh, own.placements, src_data_rank=None
            )
