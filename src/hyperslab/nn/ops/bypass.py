"""Rules of functions that ask for none by themselves: ``torch_private`` has torch's ask.

einops asks the backends it knows for one that fits a tensor: here is one for Slabs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from hyperslab.comm.mesh import with_first_mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.nn.op import define
from hyperslab.nn.plain_random import active_draws
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import patch_for


@define("shape", torch.as_tensor)
def as_tensor(
    data: Slab, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Any:
    """A Slab is a tensor already."""
    return data.to(device or data.device, dtype or data.dtype)


@define("shape", CheckpointFunction.apply)
def reentrant_checkpoint(*args: Any) -> Any:
    """Refused: it gives gradients to the tensors among its arguments, and a Slab is none."""
    raise UnsupportedOp(
        "a reentrant checkpoint cannot run on split tensors: call "
        "torch.utils.checkpoint.checkpoint with use_reentrant=False"
    )


# After the rules above, which are those of functions as torch has them.
with_first_mesh(partial(patch_for, Slab, active_draws))

_made: list[type] = []  # einops finds classes only while somebody holds them


@with_first_mesh
def make_einops_backend() -> None:
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
