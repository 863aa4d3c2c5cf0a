"""PyTorch's own convolutions, without the kernels of the GPU that were found wrong.

Those are avoided for their dtype and memory format: bf16 and fp16 are computed in float32, float32
without TF32, and where that is wrong too, without cuDNN. While nothing is wrong, and nearly always
nothing is, a call costs one look at an empty set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hyperslab.kernels.conv_check import PRECISIONS, fp32_precision

_log = logging.getLogger("hyperslab")

_wrong: set[tuple[str, str]] = set()
"""Precisions with memory formats."""
_device_type = "cuda"

MOST_NAMED = 3


def avoid(names: Iterable[str], device: torch.device, about: str, *, tell: bool) -> None:
    """Avoids the kernels that ``names`` call wrong from now on; warns once, if ``tell``."""
    global _device_type
    found = sorted(set(names))
    pairs = {(precision, layout) for precision, layout, _ in (name.split(" ", 2) for name in found)}
    if pairs <= _wrong:
        return
    _wrong.update(pairs)
    _device_type = device.type
    if tell:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        _log.warning(
            "3-d convolutions of %s are wrong in %s%s: they are computed in float32 or without "
            "cuDNN, which is slower; another version of cuDNN may be right",
            about,
            ", ".join(found[:MOST_NAMED]),
            more,
        )


def avoids_any() -> bool:
    return bool(_wrong)


def is_avoided(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether PyTorch's own convolution of ``x`` in ``dtype``, else the weight's, is wrong."""
    if not _wrong or x.ndim != 5 or x.device.type != _device_type:
        return False
    layout = _layout(x, weight)
    return any((name, layout) in _wrong for name in _names(dtype or weight.dtype))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """``torch.convolution``, without kernels that were found wrong."""
    if not is_avoided(x, weight):
        return torch.convolution(x, weight, bias, *settings)
    wide_bias = None if bias is None else bias.float()
    with _safely(_layout(x, weight)):
        return torch.convolution(x.float(), weight.float(), wide_bias, *settings).to(x.dtype)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *settings: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias by torch, which can be differentiated.

    Computed without kernels that were found wrong.
    """
    run = torch.ops.aten.convolution_backward.default
    if not is_avoided(x, weight):
        return run(grad, x, weight, *settings)  # type: ignore[no-any-return]
    with _safely(_layout(x, weight)):
        found = run(grad.float(), x.float(), weight.float(), *settings)
    first, second, third = (None if each is None else each.to(x.dtype) for each in found)
    return first, second, third


def _names(dtype: torch.dtype) -> list[str]:
    """The names of the precisions in which torch may compute."""
    if dtype != torch.float32:
        return [name for name, each in PRECISIONS.items() if each == dtype]
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return ["tf32", "float32"] if precision == "tf32" else ["float32"]


def _layout(x: Tensor, weight: Tensor) -> str:
    """The memory format in which torch calls cuDNN: channels last if one is, be it with gaps."""
    return "channels_last" if _has_channels_last(x) or _has_channels_last(weight) else "contiguous"


def _has_channels_last(x: Tensor) -> bool:
    """Whether strides grow from channels over width, height and depth to samples."""
    least = 0
    for dim in (1, 4, 3, 2, 0):
        stride = x.stride(dim)
        if stride < least or stride == 0 or (dim == 0 and least == x.stride(1)):
            return False
        least = stride * x.shape[dim]
    return True


@contextmanager
def _safely(layout: str) -> Iterator[None]:
    """Switches off, within it, what was found wrong in float32."""
    cudnn = torch.backends.cudnn
    was_enabled, precision = cudnn.enabled, cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    is_tf32_wrong = ("tf32", layout) in _wrong
    cudnn.enabled = was_enabled and ("float32", layout) not in _wrong
    try:
        with fp32_precision("ieee" if is_tf32_wrong else precision):
            yield
    finally:
        cudnn.enabled = was_enabled
