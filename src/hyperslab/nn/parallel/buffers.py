"""Buffers that are assigned Slabs hold plain tensors, so that a ``state_dict`` does."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from hyperslab.comm.mesh import with_first_mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.nn.slab import Slab


def plain_buffer(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """The whole tensor in place of a Slab that becomes the buffer ``name``."""
    if not isinstance(value, Slab):
        return None
    if value.layout.split_dims:
        raise UnsupportedOp(
            f"the buffer {name} of {type(module).__name__} cannot hold a tensor of "
            f"{value.layout.describe()}, of which every rank has another piece: give it "
            "hyperslab.gather(x), the whole on every rank"
        )
    return value.local


with_first_mesh(partial(register_module_buffer_registration_hook, plain_buffer))  # type: ignore[arg-type]
