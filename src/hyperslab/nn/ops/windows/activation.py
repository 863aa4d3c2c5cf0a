"""ReLUs that wait for the pool after them, where one kernel does both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import fused
from hyperslab.nn.deferred import ACTIVATIONS, Deferred, defer_activation
from hyperslab.nn.op import OPS, replace_rule
from hyperslab.nn.slab import Slab


def _make_rule(function: Callable[..., Any], slope_of: Callable[..., tuple[float, bool]]) -> None:
    pointwise = OPS[function].rule

    @replace_rule(function)
    def activate(input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not Slab or fused.pays(input.local):
            slope, in_place = slope_of(*args, **kwargs)
            if _can_wait(input, slope, in_place=in_place):
                return defer_activation(input, slope, in_place=in_place)
        return pointwise(input, *args, **kwargs)

    ACTIVATIONS.add(function)


def _can_wait(x: Any, slope: float, *, in_place: bool) -> bool:
    if not 0 <= slope < math.inf:
        return False
    if isinstance(x, Deferred) and x.source is not None:
        return x.slope == 1
    if type(x) is not Slab or not fused.pays(x.local) or x.local.is_inference():
        return False
    is_leaf = x.local.is_leaf and x.local.requires_grad  # torch refuses to write into it
    return not in_place or not (x.is_view or x.is_part or is_leaf)


def _relu(inplace: bool = False) -> tuple[float, bool]:
    return 0.0, inplace


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> tuple[float, bool]:
    return negative_slope, inplace


for _function in (F.relu, torch.relu, Tensor.relu):
    _make_rule(_function, _relu)
for _function in (F.relu_, torch.relu_, Tensor.relu_):
    _make_rule(_function, lambda: _relu(inplace=True))
_make_rule(F.leaky_relu, _leaky_relu)
_make_rule(F.leaky_relu_, lambda negative_slope=0.01: _leaky_relu(negative_slope, inplace=True))
