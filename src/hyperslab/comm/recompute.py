"""Backward passes that send messages, within activation checkpoints.

A checkpoint runs its part of the network again when the first tensor that it did not keep is asked
for, and that run sends messages too. Ranks must agree on which come first, and need not ask at the
same place: their pieces may be empty, or need no neighbours. So whatever sends messages in a
backward pass asks before it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def save_marker(ctx: Any, x: Tensor) -> None:
    """In the forward pass of a Function that saves nothing else."""
    ctx.has_marker = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if ctx.has_marker:
        ctx.save_for_backward(x.new_empty(0))


def recompute_first(ctx: Any) -> None:
    """In its backward pass, before messages."""
    if ctx.has_marker:  # or a second backward pass, which needs nothing, would be refused
        ctx.saved_tensors  # noqa: B018
