"""One rank by itself: torch's own functions of small tensors, with nothing before or after.

There the rules would come to the same call, after checks and plans that take longer than it does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import fused, tiles
from hyperslab.kernels.torch_conv import avoids_any
from hyperslab.layout import Layout
from hyperslab.nn.op import OPS, replace_rule
from hyperslab.nn.slab import Slab

MAX_GROWTH = 1 << 5
"""How many times larger than their input outputs are taken to be at most, for each filter."""

MANY_CHANNELS = 32
"""Convolutions from more channels to more filters have no fused kernels."""

_CONVS = F.conv2d, F.conv3d
_POOLS = (
    *(getattr(F, f"{name}{dims}d") for name in ("avg_pool", "max_pool") for dims in (2, 3)),
    *(torch.max_pool2d, torch.max_pool3d),  # what torch makes of those of F
)
_RELUS = F.relu, F.leaky_relu, torch.relu
_OTHERS = (
    *(F.batch_norm, F.group_norm, F.instance_norm),
    *(F.elu, F.gelu, F.silu, torch.sigmoid, torch.tanh),
)

Easy = Callable[[Tensor, tuple[Any, ...]], bool]
"""Whether a tensor, with the arguments of a function, needs neither tiles nor fused kernels."""


def _shorten(function: Callable[..., Any], is_easy: Easy, *, to_view: bool = False) -> None:
    """Lets the rule of ``function`` serve only where it has something to do, or to say."""
    rule = OPS[function].rule

    @replace_rule(function)
    @wraps(rule)
    def shortcut(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if type(x) is not Slab or x.mesh.backend is not None or not is_easy(x.local, args):
            return rule(*args, **kwargs)
        if _has_more_slabs(args[1:], kwargs):
            return rule(*args, **kwargs)
        try:
            local = function(x.local, *args[1:], **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return rule(*args, **kwargs)  # which says what is wrong, or does what torch cannot
        if local is x.local:
            return x
        if not isinstance(local, Tensor):
            return rule(*args, **kwargs)
        layout = Layout.unsplit(local.shape)
        return x.viewed(local, layout) if to_view else Slab(local, layout, x.mesh)


def _shorten_loss(function: Callable[..., Any], fits: Callable[[Any, Any], bool]) -> None:
    """As ``_shorten``, for input and target of shapes that fit."""
    rule = OPS[function].rule

    @replace_rule(function)
    @wraps(rule)
    def shortcut(*args: Any, **kwargs: Any) -> Any:
        x, target = args[:2] if len(args) > 1 else (None, None)
        if type(x) is not Slab or type(target) is not Slab or x.mesh.backend is not None:
            return rule(*args, **kwargs)
        if _has_more_slabs(args[2:], kwargs) or not fits(x.layout.shape, target.layout.shape):
            return rule(*args, **kwargs)
        local = function(x.local, target.local, *args[2:], **kwargs)
        return Slab(local, Layout.unsplit(local.shape), x.mesh) if local.ndim else local


def _is_small(x: Tensor, args: tuple[Any, ...]) -> bool:
    return x.numel() * MAX_GROWTH <= tiles.MAX_NUMEL


def _is_small_and_unfused(x: Tensor, args: tuple[Any, ...]) -> bool:
    return _is_small(x, args) and not fused.pays(x)


def _is_small_conv(x: Tensor, args: tuple[Any, ...]) -> bool:
    """Where the weight is not told by its place, it is not known."""
    weight = args[1] if len(args) > 1 else None
    if not isinstance(weight, Tensor) or weight.ndim < 2 or 0 in weight.shape or avoids_any():
        return False
    filters, channels = weight.shape[:2]
    if x.numel() * max(1, filters / channels) * MAX_GROWTH > tiles.MAX_NUMEL:
        return False
    return min(filters, channels) > MANY_CHANNELS or not fused.pays(x)


def _is_small_linear(x: Tensor, args: tuple[Any, ...]) -> bool:
    weight = args[1] if len(args) > 1 else None
    if not isinstance(weight, Tensor) or not weight.ndim:
        return False
    return x.numel() * len(weight) * MAX_GROWTH <= tiles.MAX_NUMEL


def _has_more_slabs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for arg in (*args, *kwargs.values()):  # noqa: SIM110 - any() takes twice as long
        if isinstance(arg, Slab):
            return True
    return False


for _functions, _is_easy in (
    (_CONVS, _is_small_conv),
    (_POOLS, _is_small_and_unfused),
    (_RELUS, _is_small_and_unfused),
    (_OTHERS, _is_small),
    ((F.linear,), _is_small_linear),
):
    for _function in _functions:
        _shorten(_function, _is_easy)
for _function in (torch.flatten, Tensor.flatten):
    _shorten(_function, _is_small, to_view=True)
_shorten_loss(F.mse_loss, operator.eq)
_shorten_loss(F.cross_entropy, lambda scores, labels: labels == scores[:1] + scores[2:])
