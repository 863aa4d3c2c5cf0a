"""Which functions of tensors on one rank are not simply torch's own, and when."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import fused, tiles
from hyperslab.kernels.torch_conv import avoids_any
from hyperslab.layout import per_dim

Function = Callable[..., Any]
Needs = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], bool]
"""Whether a rule has something to offer for a function's input and all its arguments."""

MAX_GROWTH = 1 << 5
"""How many times larger than their input outputs are taken to be at most, for each filter."""

MIN_NUMEL = 1 << 23
"""Fused kernels serve from as many elements on.

A pass that is not recorded waits for the host, and a fused kernel takes it some 0.2 ms longer than
a call of torch's: pieces of several ranks, whose passes are recorded, gain from fewer.
"""

MANY_CHANNELS = 32
"""Convolutions from more channels to more filters have no fused kernels."""


def is_large(x: Tensor, *_: Any) -> bool:
    """Whether ``x``, or what a window makes of it, may be too large for one call."""
    return x.numel() * MAX_GROWTH > tiles.MAX_NUMEL


def is_too_large(x: Tensor, *_: Any) -> bool:
    """Whether ``x`` itself is too large for one call, as for a norm."""
    return x.numel() > tiles.MAX_NUMEL


def pays(x: Tensor) -> bool:
    """Whether fused kernels of ``x`` gain more than they cost the host."""
    return x.numel() >= MIN_NUMEL and fused.pays(x)


def is_large_or_fused(x: Tensor, *_: Any) -> bool:
    return is_large(x) or pays(x)


def may_wait(x: Tensor, *, inplace: bool) -> bool:
    """Whether an activation of ``x`` is deferred: one in place is not."""
    return not inplace and pays(x)


def _activation_needs(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not kwargs.get("inplace") and pays(x)


def conv_needs(
    x: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> bool:
    """Whether a convolution of ``x`` is not simply torch's own."""
    if avoids_any():
        return True
    numel = x.numel()
    if 0 < numel < MIN_NUMEL and numel * MAX_GROWTH * weight.size(0) <= tiles.MAX_NUMEL:
        return False  # by looks at numbers alone, as every convolution is looked at
    shape = weight.shape
    if len(shape) < 2:
        return True
    filters, channels = shape[0], shape[1]
    growth = MAX_GROWTH * (filters if filters > channels else channels)
    if numel * growth > tiles.MAX_NUMEL * channels and _is_large_conv(
        x.shape, shape, stride, padding, dilation
    ):
        return True
    if filters > MANY_CHANNELS and channels > MANY_CHANNELS:
        return False
    return pays(x) and (stride if isinstance(stride, int) else max(stride)) == 1


def _is_large_conv(
    shape: torch.Size, weight_shape: torch.Size, stride: Any, padding: Any, dilation: Any
) -> bool:
    """Whether a convolution reads or makes too many elements for one call, or torch refuses it."""
    filters, kernel = weight_shape[0], weight_shape[2:]
    num_dims = len(kernel)
    if 0 in weight_shape or not num_dims or len(shape) not in (num_dims + 1, num_dims + 2):
        return True
    pads = 0 if isinstance(padding, str) else padding
    numbers = (per_dim(each, num_dims) for each in (stride, pads, dilation))
    outputs = math.prod(shape[: -num_dims - 1]) * filters
    for n, k, step, pad, apart in zip(shape[-num_dims:], kernel, *numbers, strict=True):
        # "same" makes as many as it reads, and "valid" no more.
        reads = n if isinstance(padding, str) else n + 2 * pad - apart * (k - 1)
        outputs *= 1 + max(reads - 1, 0) // max(step, 1)
    return max(math.prod(shape), outputs) > tiles.MAX_NUMEL


def conv_transpose_needs(x: Tensor, weight: Tensor) -> bool:
    """As ``conv_needs``; its strides make it larger, and there are few of them in a network."""
    return (
        weight.dim() < 2
        or avoids_any()
        or (x.numel() * weight.size(1) * MAX_GROWTH**2 > tiles.MAX_NUMEL)
    )


def _conv_needs(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    stride = args[3] if len(args) > 3 else kwargs.get("stride", 1)
    padding = args[4] if len(args) > 4 else kwargs.get("padding", 0)
    dilation = args[5] if len(args) > 5 else kwargs.get("dilation", 1)
    if not isinstance(weight, Tensor):
        return True
    return conv_needs(x, weight, stride, padding, dilation)


def _conv_transpose_needs(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    return not isinstance(weight, Tensor) or conv_transpose_needs(x, weight)


def _draws(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of tensors whose elements lie in memory, not of DTensors, sparse or nested ones."""
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or x.is_nested:
        return False
    return x.layout is torch.strided and kwargs.get("out") is None


def _drops(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    is_training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(is_training) and _draws(x, args, kwargs)


def _named(spaces: tuple[Any, ...], *names: str) -> list[Function]:
    return [getattr(space, name) for space in spaces for name in names if hasattr(space, name)]


def _per_dim(spaces: tuple[Any, ...], *names: str) -> list[Function]:
    return _named(spaces, *(name.format(n) for name in names for n in (1, 2, 3)))


_BOTH = (F, torch)
SERVED: dict[Function, Needs] = {
    **dict.fromkeys(_per_dim(_BOTH, "conv{}d"), _conv_needs),
    **dict.fromkeys(_per_dim(_BOTH, "conv_transpose{}d"), _conv_transpose_needs),
    **dict.fromkeys(
        _per_dim(_BOTH, "avg_pool{}d", "max_pool{}d", "max_pool{}d_with_indices", "lp_pool{}d"),
        is_large_or_fused,
    ),
    **dict.fromkeys(_per_dim(_BOTH, "adaptive_avg_pool{}d", "adaptive_max_pool{}d"), is_large),
    **dict.fromkeys(
        _named(_BOTH, "batch_norm", "group_norm", "instance_norm", "layer_norm"), is_too_large
    ),
    F.interpolate: is_large,
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, F.leaky_relu), _activation_needs),
    **dict.fromkeys(
        _named(_BOTH, "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _drops
    ),
    **dict.fromkeys(_named(_BOTH, "alpha_dropout", "feature_alpha_dropout"), _drops),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.bernoulli), _draws),
    **dict.fromkeys(_named((Tensor,), "bernoulli_", "normal_", "uniform_", "exponential_"), _draws),
    F.gumbel_softmax: _draws,
}
"""The functions that rules may compute, each with what tells whether they are to."""
