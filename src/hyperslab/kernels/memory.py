"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_like_format(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of ``shape``, otherwise as ``like``, its memory format included."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=memory_format_of(like)
    )


def empty_channels_last(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of ``shape``, no view, of the dtype and on the device of ``like``."""
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=last)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Channels last where ``x`` is so and not also contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format
