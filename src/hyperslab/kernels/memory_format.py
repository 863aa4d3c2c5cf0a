"""How tensors lie in memory, and tensors with rows of memory beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RowsBeside = tuple[int, int]
"""Before and after a tensor, along dim 2: a halo received there needs no copy of the tensor.

The tensors are one sample, channels last, so that such rows lie one after the other.
"""
_ROWS = "rows_beside"


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


def empty_with_rows(
    shape: Sequence[int], rows: RowsBeside, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised tensor of ``shape``, one sample, that is no view."""
    samples, channels, num, *sizes = shape
    assert samples == 1
    long = (1, channels, rows[0] + num + rows[1], *sizes)
    last = channels_last(len(shape))
    whole = torch.empty(long, dtype=dtype, device=device, memory_format=last)
    found = _in_memory_of(whole, rows[0], num)
    setattr(found, _ROWS, rows)
    return found


def has_rows(x: Tensor, rows: RowsBeside) -> bool:
    """Whether there are ``rows`` beside ``x`` that nobody has asked for."""
    room: RowsBeside | None = getattr(x, _ROWS, None)
    return room is not None and room[0] >= rows[0] and room[1] >= rows[1]


def window_around(x: Tensor, rows: RowsBeside) -> Tensor | None:
    """``x`` with ``rows``, in the same memory, if it has them and nobody else has asked for them.

    The tensor is no view of ``x``: writing into one does not change the other's version.
    """
    if not has_rows(x, rows):
        return None
    delattr(x, _ROWS)
    return _in_memory_of(x, -rows[0], x.shape[2] + sum(rows))


def _in_memory_of(x: Tensor, first: int, num: int) -> Tensor:
    """Rows from ``first`` on, which may lie before those of ``x``."""
    row = x.stride(2)
    strides = (num * row, *x.stride()[1:])
    start = x.storage_offset() + first * row
    shape = (*x.shape[:2], num, *x.shape[3:])
    return x.new_empty(0).set_(x.untyped_storage(), start, shape, strides)
