"""Where fused kernels are taken instead of PyTorch's."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

WANTED = os.environ.get("HYPERSLAB_FUSED") != "0"
"""Unless the user does without them, as those must who differentiate gradients."""
FASTER_ON = {(9, 0)}
"""The compute capabilities of GPUs on which they were measured to be right and faster."""
MIN_NUMEL = 1 << 23
"""Smaller tensors gain less than a launch costs the host."""


def pays(x: Tensor) -> bool:
    """Whether fused kernels of ``x``, or of a tensor of its size, are faster than PyTorch's."""
    return (
        x.is_cuda
        and x.numel() >= MIN_NUMEL
        and type(x) is Tensor  # and not one without memory, in a graph
        and is_measured(x.device)
    )


def is_measured(device: torch.device) -> bool:
    """Whether fused kernels were measured on GPUs like ``device``, and can run."""
    return WANTED and _has_triton() and _capability(device) in FASTER_ON


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


_capability = lru_cache(torch.cuda.get_device_capability)
