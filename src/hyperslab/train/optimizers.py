"""Optimizers by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hyperslab.errors import ConfigError
from hyperslab.train.config import OptimizerConfig
from hyperslab.train.named import find_named

OPTIMIZERS = ("adam", "adamw", "sgd", "lamb")


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    make = _find(config.name)
    given = {"lr": config.lr, "weight_decay": config.weight_decay, **config.options}
    _check_options(make, given, config.name)
    try:
        return make(_groups(model, config.weight_decay), **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {config.name} cannot be made with {given}: {error}"
        ) from error


def _find(name: str) -> Callable[..., Optimizer]:
    if ":" in name:
        return find_named(name, "optimizer.name")
    if name == "lamb":
        return _lamb()
    known = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if name not in known:
        near = difflib.get_close_matches(name.lower(), OPTIMIZERS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"optimizer.name must be one of {', '.join(OPTIMIZERS)}, or module:Class, got "
            f"{name!r}{hint}"
        )
    return known[name]


def _lamb() -> Callable[..., Optimizer]:
    try:
        from pytorch_optimizer import Lamb
    except ImportError as error:
        raise ConfigError(
            "optimizer.name = 'lamb' needs the package pytorch_optimizer: "
            "pip install 'hyperslab[train]'"
        ) from error
    return Lamb


def _check_options(make: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    parameters = inspect.signature(make).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    valid = [key for key in parameters if key not in ("self", "params")]
    for key in given:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f": it has {', '.join(valid)}"
            raise ConfigError(f"optimizer {name} has no option {key!r}{hint}")


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights, and apart from them biases and norms' scales, which must not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameters to train")
    if not weight_decay:
        return [{"params": trained}]
    weights = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
