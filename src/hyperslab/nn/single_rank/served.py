"""Which functions of tensors on one rank are not simply torch's own, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import fused, tiles
from hyperslab.kernels.torch_conv import avoids_any

Function = Callable[..., Any]
Needs = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], bool]
"""Whether a rule has something to offer for a function's input and all its arguments."""

MAX_GROWTH = 1 << 5
"""How many times larger than their input outputs are taken to be at most, for each filter."""

MANY_CHANNELS = 32
"""Convolutions from more channels to more filters have no fused kernels."""


def is_large(x: Tensor, *_: Any) -> bool:
    """Whether ``x``, or what a window makes of it, may be too large for one call."""
    return x.numel() * MAX_GROWTH > tiles.MAX_NUMEL


def is_large_or_fused(x: Tensor, *_: Any) -> bool:
    return is_large(x) or fused.pays(x)


def may_wait(x: Tensor, *, inplace: bool) -> bool:
    """Whether an activation of ``x`` is deferred: one in place is not."""
    return not inplace and fused.pays(x)


def _activation_needs(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not kwargs.get("inplace") and fused.pays(x)


def conv_needs(x: Tensor, weight: Tensor, stride: Any = 1) -> bool:
    """Whether a convolution of ``x`` is not simply torch's own."""
    shape = weight.shape
    if len(shape) < 2 or avoids_any():
        return True
    filters, channels, numel = shape[0], shape[1], x.numel()
    if not channels or numel * MAX_GROWTH > tiles.MAX_NUMEL:
        return True
    if filters > channels and numel * MAX_GROWTH * filters > tiles.MAX_NUMEL * channels:
        return True
    if filters > MANY_CHANNELS and channels > MANY_CHANNELS:
        return False
    return fused.pays(x) and (stride if isinstance(stride, int) else max(stride)) == 1


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
    return not isinstance(weight, Tensor) or conv_needs(x, weight, stride)


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
        _named(_BOTH, "batch_norm", "group_norm", "instance_norm", "layer_norm", "interpolate"),
        is_large,
    ),
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
