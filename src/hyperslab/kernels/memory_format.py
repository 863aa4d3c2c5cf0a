"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def channels_last(ndim: int) -> torch.memory_format:
    """The channels-last memory format of images (4 dims) or volumes (5)."""
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


def empty_channels_last(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of ``shape``, no view, of the dtype and on the device of ``like``."""
    last = channels_last(len(shape))
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=last)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The memory format of ``x``: channels last where it is so and not also contiguous."""
    if x.ndim not in (4, 5) or x.is_contiguous():
        return torch.contiguous_format
    last = channels_last(x.ndim)
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format
