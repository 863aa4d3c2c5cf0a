"""Layers of dropout that give plain tensors the masks that Slabs would have.

Masks depend on the seed and the index alone, so that a model has the same ones on any mesh: also
where, on one rank, it runs without Slabs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import dropout

from hyperslab.nn.tile_slab import alone
from hyperslab.nn.watched_slab import WatchedSlab

_FORWARDS = {getattr(dropout, name).forward for name in dropout.__all__}


def install_dropouts(modules: Iterable[nn.Module]) -> None:
    """Gives torch's layers of dropout among ``modules`` such a ``forward``, where it is theirs."""
    for part in modules:
        if type(part).forward in _FORWARDS and "forward" not in part.__dict__:
            part.__dict__["forward"] = LoneDropout(part)


class LoneDropout:
    """The ``forward`` of ``layer``. Names, keys and hooks stay."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, input: Any) -> Any:
        if is_dynamo_compiling() or not self._layer.training:
            return self._forward(input)
        if isinstance(input, WatchedSlab):  # which so does not see that numbers are drawn
            out = self._forward(input.inner)
            return input if out is input.inner else input.watch.show(out)
        if type(input) is Tensor:
            return self._forward(alone(input)).local
        return self._forward(input)

    def _forward(self, input: Any) -> Any:
        return type(self._layer).forward(self._layer, input)
