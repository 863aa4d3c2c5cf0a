"""Slabs in einops, which asks the backends it knows for one that fits a tensor."""

from __future__ import annotations

from typing import Any

from hyperslab.comm.mesh import with_first_mesh
from hyperslab.nn.slab import Slab

_made: list[type] = []  # einops finds classes only while somebody holds them


@with_first_mesh
def make_backend() -> None:
    """Makes a subclass of einops' backends, which is how einops finds them."""
    try:
        from einops._backends import TorchBackend
    except ImportError:  # nobody will ask
        return

    class SlabBackend(TorchBackend):  # type: ignore[misc]
        """What einops calls on a Slab: the functions that it calls on a tensor, by their rules."""

        framework_name = "hyperslab"

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, Slab)

    _made.append(SlabBackend)
