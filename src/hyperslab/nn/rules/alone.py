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
from hyperslab.layout import Layout
from hyperslab.nn.registry import register, rule_of
from hyperslab.nn.slab import Slab

MAX_GROWTH = 1 << 5
"""How many times larger than their input outputs are taken to be at most, for each filter."""

_WEIGHTED = F.conv2d, F.conv3d, F.linear
_FUNCTIONS = (
    *(getattr(F, f"{name}{dims}d") for name in ("avg_pool", "max_pool") for dims in (2, 3)),
    *(torch.max_pool2d, torch.max_pool3d),  # what torch makes of those of F
    *(F.batch_norm, F.group_norm, F.instance_norm),
    *(F.relu, F.leaky_relu, F.elu, F.gelu, F.silu, torch.relu, torch.sigmoid, torch.tanh),
)


def _shorten(
    function: Callable[..., Any],
    *,
    to_view: bool = False,
    num_filters: Callable[[tuple[Any, ...]], int] = lambda args: 1,
) -> None:
    """Lets the rule of ``function`` serve only where it has something to do, or to say.

    ``num_filters`` tells from the arguments how many outputs an input can have.
    """
    rule = rule_of(function)

    @register(function)
    @wraps(rule)
    def shortcut(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if type(x) is not Slab or not _is_easy(x, num_filters(args)):
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
    rule = rule_of(function)

    @register(function)
    @wraps(rule)
    def shortcut(*args: Any, **kwargs: Any) -> Any:
        x, target = args[:2] if len(args) > 1 else (None, None)
        if type(x) is not Slab or type(target) is not Slab or x.mesh.backend is not None:
            return rule(*args, **kwargs)
        if _has_more_slabs(args[2:], kwargs) or not fits(x.layout.shape, target.layout.shape):
            return rule(*args, **kwargs)
        local = function(x.local, target.local, *args[2:], **kwargs)
        return Slab(local, Layout.unsplit(local.shape), x.mesh) if local.ndim else local


def _is_easy(x: Slab, num_filters: int) -> bool:
    """Whether there is no other rank, no tile and no fused kernel."""
    if x.mesh.backend is not None:
        return False
    outputs = x.local.numel() * num_filters * MAX_GROWTH
    return outputs <= tiles.MAX_NUMEL and not fused.pays(x.local)


def _len_of_weight(args: tuple[Any, ...]) -> int:
    """Where the weight is not told by its place, more than anything easy has."""
    weight = args[1] if len(args) > 1 else None
    return len(weight) if isinstance(weight, Tensor) and weight.ndim else tiles.MAX_NUMEL


def _has_more_slabs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for arg in (*args, *kwargs.values()):  # noqa: SIM110 - any() takes twice as long
        if isinstance(arg, Slab):
            return True
    return False


for _function in _FUNCTIONS:
    _shorten(_function)
for _function in _WEIGHTED:
    _shorten(_function, num_filters=_len_of_weight)
for _function in (torch.flatten, Tensor.flatten):
    _shorten(_function, to_view=True)
_shorten_loss(F.mse_loss, operator.eq)
_shorten_loss(F.cross_entropy, lambda scores, labels: labels == scores[:1] + scores[2:])
