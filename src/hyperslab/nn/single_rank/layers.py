"""Layers of torch that run outside of the mode of a single rank, where it cannot serve them.

The mode costs the host some microseconds for every function. What torch's own layers call is known,
so that one look at their input tells whether any of it is served. This changes times and nothing
else: layers that are not known here run in the mode, and the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import batchnorm, conv, dropout, instancenorm, pooling

from hyperslab.nn.dispatch import waiting
from hyperslab.nn.op import IMPLEMENTED, USERS
from hyperslab.nn.single_rank.mode import SingleRankMode
from hyperslab.nn.single_rank.served import (
    conv_needs,
    conv_transpose_needs,
    is_large,
    is_large_or_fused,
    may_wait,
)
from hyperslab.torch_private import num_function_modes, pop_function_mode, push_function_mode

Needs = Callable[[Any, Tensor], bool]
"""Whether the mode may serve a layer with this input."""


def _large(layer: Any, x: Tensor) -> bool:
    return is_large(x)


def _large_or_fused(layer: Any, x: Tensor) -> bool:
    return is_large_or_fused(x)


def _convolved(layer: Any, x: Tensor) -> bool:
    weight = layer._parameters["weight"]  # in a third of the time that layer.weight takes
    return weight is None or conv_needs(x, weight)


def _convolved_transposed(layer: Any, x: Tensor) -> bool:
    return conv_transpose_needs(x, layer.weight)


def _activated(layer: Any, x: Tensor) -> bool:
    return may_wait(x, inplace=layer.inplace)


def _in_training(layer: Any, x: Tensor) -> bool:
    return bool(layer.training)


def _classes(module: Any, *names: str) -> list[type[nn.Module]]:
    return [getattr(module, f"{name}{n}d") for name in names for n in (1, 2, 3)]


LAYERS: dict[type[nn.Module], Needs] = {
    **dict.fromkeys(_classes(conv, "Conv"), _convolved),
    **dict.fromkeys(_classes(conv, "ConvTranspose"), _convolved_transposed),
    **dict.fromkeys(_classes(batchnorm, "BatchNorm"), _large),
    **dict.fromkeys(_classes(instancenorm, "InstanceNorm"), _large),
    **dict.fromkeys((nn.GroupNorm, nn.LayerNorm), _large),
    **dict.fromkeys(_classes(pooling, "MaxPool", "AvgPool"), _large_or_fused),
    **dict.fromkeys(_classes(pooling, "AdaptiveAvgPool", "AdaptiveMaxPool"), _large),
    **dict.fromkeys(_classes(dropout, "Dropout"), _in_training),
    **dict.fromkeys((nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout), _in_training),
    **dict.fromkeys((nn.ReLU, nn.LeakyReLU), _activated),
}
"""The layers that are known, with what tells whether the mode may serve them."""


_OF_EVERY_CLASS = {
    *("__init__", "__module__", "__doc__", "__annotations__", "__dict__", "__weakref__"),
    *("__firstlineno__", "__static_attributes__"),
}


def _needs_of(cls: type[nn.Module]) -> Needs | None:
    """That of a known layer, or of a class which adds nothing to one but how it is made."""
    for base in cls.__mro__:
        if base in LAYERS:
            return LAYERS[base]
        added = {name for name, value in vars(base).items() if not isinstance(value, staticmethod)}
        if not added <= _OF_EVERY_CLASS:
            return None
    return None


class KnownLayers:
    """Those of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._forwards = [
            (part.__dict__, _Forward(part, needs))
            for part in module.modules()
            if (needs := _needs_of(type(part))) is not None and "forward" not in part.__dict__
        ]

    @contextmanager
    def outside_of_the_mode(self) -> Iterator[None]:
        """Within it, these layers leave the mode for as long as they run, if it cannot serve them.

        Another thread that ends its pass meanwhile costs this one some time. Where users have rules
        or implementations of their own, all layers stay in the mode.
        """
        for attributes, forward in () if USERS or IMPLEMENTED else self._forwards:
            if "forward" not in attributes:
                attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, forward in self._forwards:
                if attributes.get("forward") is forward:
                    del attributes["forward"]


class _Forward:
    """The ``forward`` of ``layer``."""

    __slots__ = ("_forward", "_layer", "_needs")

    def __init__(self, layer: nn.Module, needs: Needs) -> None:
        self._layer, self._needs, self._forward = layer, needs, type(layer).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or is_dynamo_compiling() or waiting.calls:
            return self._forward(self._layer, *args, **kwargs)
        if not num_function_modes():
            return self._forward(self._layer, *args)
        mode = pop_function_mode()
        try:
            is_served = type(mode) is not SingleRankMode or mode.is_paused
            if not is_served and isinstance(args[0], Tensor):
                is_served = self._needs(self._layer, args[0])
                if not is_served:
                    return self._forward(self._layer, *args)
        finally:
            push_function_mode(mode)
        return self._forward(self._layer, *args)
