"""The windows of convolutions and pools, from the numbers that users give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import SupportsIndex

from hyperslab.errors import LayoutError
from hyperslab.layout.window import TransposedWindow, Window

Numbers = int | Sequence[int]


def integers(value: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """One number, or several, as torch reads them: numpy's integers are as good as Python's."""
    if type(value) is not tuple and hasattr(value, "__index__"):
        return (index(value),)  # type: ignore[arg-type]
    return tuple(map(index, value))


def per_dim(value: Numbers, num_dims: int) -> tuple[int, ...]:
    """One value a dim, as torch reads an argument that may be a number, or a list of one or all."""
    values = integers(value)
    if len(values) not in (1, num_dims):
        raise LayoutError(f"{values} should be one number, or one for each of {num_dims} dims")
    return values * num_dims if len(values) == 1 else values


def pool_numbers(
    num_dims: int, kernel: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers = 1
) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation of a pool, each with one number a dim."""
    kernels = per_dim(kernel, num_dims)
    strides = () if stride is None else integers(stride)
    return (
        kernels,
        per_dim(strides, num_dims) if strides else kernels,
        per_dim(padding, num_dims),
        per_dim(dilation, num_dims),
    )


def check_steps(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int] = (1,)
) -> None:
    """Raises where torch would refuse these numbers."""
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise LayoutError(
            "stride and dilation must be at least 1 and padding at least 0, got stride "
            f"{tuple(stride)}, dilation {tuple(dilation)} and padding {tuple(padding)}"
        )


@lru_cache(maxsize=4096)
def conv_windows(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Window, ...]:
    """Those of a convolution; ``padding`` may be "same" or "valid"."""
    if padding == "same":
        if any(step != 1 for step in stride):
            raise LayoutError("padding='same' is not supported for strided convolutions")
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(
            Window(k, 1, total // 2, d, extra=total % 2)
            for k, d, total in zip(kernel, dilation, totals, strict=True)
        )
    if isinstance(padding, str) and padding != "valid":
        raise LayoutError(f"padding must be 'same', 'valid' or numbers, got {padding!r}")
    pads = (0,) * len(kernel) if isinstance(padding, str) else padding
    check_steps(stride, pads, dilation)
    return tuple(map(Window, kernel, stride, pads, dilation))


@lru_cache(maxsize=1024)
def transposed_windows(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...],
) -> tuple[TransposedWindow, ...]:
    """Those of a transposed convolution."""
    check_steps(stride, (*padding, *output_padding), dilation)
    if any(o >= max(s, d) for s, o, d in zip(stride, output_padding, dilation, strict=True)):
        raise LayoutError(
            "output padding must be smaller than either stride or dilation, got "
            f"{output_padding} with stride {stride} and dilation {dilation}"
        )
    return tuple(map(TransposedWindow, kernel, stride, padding, dilation, output_padding))


@lru_cache(maxsize=1024)
def pool_windows(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    overhung: tuple[int, ...] | None = None,
) -> tuple[Window, ...]:
    """Those of a pool; over the extents ``overhung`` they may reach beyond the padding."""
    check_steps((*kernel, *stride), padding, dilation)
    if any(not 0 <= 2 * pad <= k for pad, k in zip(padding, kernel, strict=True)):
        raise LayoutError(
            f"pool padding must be at most half the kernel, got {padding} for {kernel}"
        )
    windows = map(Window, kernel, stride, padding, dilation)
    if overhung is None:
        return tuple(windows)
    return tuple(_overhang(w, n) for w, n in zip(windows, overhung, strict=True))


def _overhang(window: Window, extent: int) -> Window:
    """``window`` with a last output that may reach beyond the padding, if it starts before it."""
    stride, pad = window.stride, window.padding
    num = -((window.reach + 1 - extent - 2 * pad) // stride) + 1
    if (num - 1) * stride >= extent + pad:
        num -= 1
    short = (num - 1) * stride + window.reach + 1 - extent - 2 * pad
    return replace(window, extra=max(0, short))
