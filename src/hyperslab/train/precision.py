"""How many bits products and sums have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hyperslab.errors import ConfigError


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within it, products of float32 on GPUs are those of TF32 if ``precision`` says so."""
    flags: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def forward_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """What forward passes and losses run in.

    Not bf16 on CPUs: there torch 2.13 leaves the weight gradients of convolutions over extents of 2
    unwritten (CosmoFlow's last layers are such), without a word.
    """
    if precision == "bf16" and device.type == "cpu":
        raise ConfigError(
            "train.precision = 'bf16' is for GPUs: on CPUs torch's gradients of some convolutions "
            "are wrong in bfloat16; use fp32, or auto"
        )
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
