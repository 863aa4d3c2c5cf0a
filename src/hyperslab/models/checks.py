"""Options and inputs that a network can use, or one line that says what it wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperslab.errors import ConfigError
from hyperslab.io.spec import shown_shape

LETTERS = "NCDHW"


def check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def check_widths(name: str, widths: Sequence[int]) -> None:
    if not widths or min(widths) < 1:
        raise ConfigError(f"{name} must be one or more numbers, each at least 1, got {widths}")


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be from 0 to below 1, got {dropout}")


def check_batch(x: Tensor, model: str, in_channels: int, num_dims: int) -> torch.Size:
    """That ``x`` is a batch of samples with ``in_channels`` and ``num_dims`` spatial dims.

    Gives the spatial extents. In the pass of a network every look at a tensor takes time.
    """
    shape = x.shape
    if len(shape) != num_dims + 2:
        dims = ", ".join(["N", "C", *LETTERS[-num_dims:]])
        raise ConfigError(
            f"{model} takes batches of dims ({dims}), got the shape {shown_shape(shape)}"
        )
    if shape[1] != in_channels:
        raise ConfigError(
            f"{model} was made for samples of {in_channels} channels and is given "
            f"{shown_shape(shape[1:])}: set in_channels = {shape[1]}"
        )
    return shape[2:]


def check_extents(x: Tensor, model: str, *, least: int, multiple_of: int = 1) -> None:
    """That every spatial extent of ``x`` is large enough, and divides."""
    extents = x.shape[2:]
    if min(extents) < least:
        raise ConfigError(f"{model} needs extents of at least {least}, got {shown_shape(extents)}")
    if any(extent % multiple_of for extent in extents):
        raise ConfigError(
            f"{model} needs extents that are multiples of {multiple_of}, got "
            f"{shown_shape(extents)}: pad or crop the samples"
        )
