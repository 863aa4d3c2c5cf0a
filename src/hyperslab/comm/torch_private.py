"""Private names of torch that comm, dist_ops and nn rest on, each with the reason why.

Nothing is patched here. A test names each and says what would make it superfluous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._library.effects import EffectType as EffectType  # messages keep their order in graphs
from torch.distributed.distributed_c10d import (
    _get_default_store as default_store,  # failure reports outlive the process groups
)
from torch.utils._python_dispatch import (
    _disable_current_modes as unwatched,  # what is computed now, whoever traces
)
from torch.utils._pytree import tree_map_only as tree_map_only

__all__ = [
    "EffectType",
    "autocasts_any_device",
    "default_store",
    "is_watched",
    "number_of_backward_pass",
    "offset_of_shard",
    "saved_tensors_hooks",
    "tree_map_only",
    "unwatched",
]

number_of_backward_pass = torch._C._current_graph_task_id
"""Of the backward pass that calls this, or -1."""
autocasts_any_device = torch._C._is_any_autocast_enabled
"""One call where there would be one for each device: it is asked for every operator."""
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks that activation checkpoints set, if any."""

if TYPE_CHECKING:  # it takes a second to load
    from torch.distributed.tensor import DTensor

_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.PROXY,
)


def is_watched() -> bool:
    """Whether operators are traced now, so that tensors may have no values.

    Modes that look on while values are computed, such as those that count FLOPs, change nothing.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def offset_of_shard(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the whole tensor; DTensor itself does not tell."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    place = tensor.shape, tensor.device_mesh, tensor.placements
    return tuple(compute_local_shape_and_global_offset(*place)[1])
