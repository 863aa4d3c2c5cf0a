"""How weights begin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


def init_glorot(module: nn.Module, bias: float) -> None:
    """Glorot's uniform weights; all biases of convolutions and dense layers the same."""
    _init(module, nn.init.xavier_uniform_, bias)


def init_he(module: nn.Module) -> None:
    """He's uniform weights, for layers followed by ReLU; biases 0."""
    _init(module, partial(nn.init.kaiming_uniform_, nonlinearity="relu"), 0.0)


def _init(module: nn.Module, draw_weight_: Callable[[Tensor], Any], bias: float) -> None:
    for layer in module.modules():
        if isinstance(layer, _ConvNd | nn.Linear):
            draw_weight_(layer.weight)
            if layer.bias is not None:
                nn.init.constant_(layer.bias, bias)
