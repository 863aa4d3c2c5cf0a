"""Slabs in einops, which asks the backends it knows for one that fits a tensor."""

from __future__ import annotations

from typing import Any

from hyperslab.nn.slab import Slab

try:
    from einops._backends import TorchBackend
except ImportError:  # nobody will ask
    pass
else:

    class SlabBackend(TorchBackend):  # type: ignore[misc]
        """What einops calls on a Slab: the functions that it calls on a tensor, by their rules."""

        framework_name = "hyperslab"

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, Slab)
