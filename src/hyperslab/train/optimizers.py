"""Optimizers by name, and the learning rate over time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.models.build import check_options
from hyperslab.train.config import OptimizerConfig, ScheduleConfig
from hyperslab.train.named import find_named

_NEEDED = inspect.Parameter.empty
_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)
OPTIMIZERS = ("adam", "adamw", "sgd", "lamb")


FACTOR = "lr_factor"
"""The key of a group of weights whose learning rate is that of the run times this."""


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, factors: Mapping[str, float] | None = None
) -> Optimizer:
    """The optimizer of all weights that are trained.

    ``factors`` are for the learning rates of weights whose names begin so; others have 1.
    """
    make = find_optimizer(config.name)
    for name in ("lr", "weight_decay"):
        if name in config.options:
            raise ConfigError(f"optimizer.options has {name!r}: set optimizer.{name} instead")
    given = {"lr": config.lr, **config.options}
    if config.weight_decay:
        given["weight_decay"] = config.weight_decay
    elif "weight_decay" in inspect.signature(make).parameters:
        given["weight_decay"] = 0.0
    check_options(make, {"params": (), **given}, f"optimizer {config.name}")
    try:
        optimizer = make(_groups(model, config.weight_decay, factors or {}), **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {config.name} cannot be made with {given}: {error}"
        ) from error
    if inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL).default is _NEEDED:
        raise ConfigError(f"optimizer {config.name} evaluates the loss by itself: choose another")
    return optimizer


def take_step(optimizer: Optimizer) -> None:
    """One step; an optimizer that cannot work on weights that are cut is told as such."""
    try:
        optimizer.step()
    except RuntimeError as error:
        weights = (p for group in optimizer.param_groups for p in group["params"])
        if not any(isinstance(weight, DTensor) for weight in weights):
            raise
        raise ConfigError(
            f"{type(optimizer).__name__} cannot work on weights that are spread over ranks "
            f"({str(error).splitlines()[0]}): set train.shard_weights = false, or choose adam, "
            "adamw or sgd"
        ) from error


def choose_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Gives a group of weights that was loaded the settings that are asked for now.

    Numbers may change while a run goes on. Switches decide what an optimizer remembers, and may
    not.
    """
    for key, value in settings.items():
        if key == "params":
            continue
        if isinstance(value, bool) and value != group.get(key):
            raise ConfigError(
                f"optimizer.options.{key} = {str(value).lower()}, but the run was begun with "
                f"{str(group.get(key)).lower()}: leave it, or begin anew in another folder"
            )
        group[key] = value


def find_optimizer(name: str) -> Callable[..., Optimizer]:
    if ":" in name:
        return find_named(name, "optimizer.name")
    if name == "lamb":
        return _lamb()
    known = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if name not in known:
        raise ConfigError(
            f"optimizer.name must be one of {', '.join(OPTIMIZERS)}, or module:Class, got "
            f"{name!r}{did_you_mean(name.lower(), OPTIMIZERS, '; ')}"
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


def give_rate(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(FACTOR, 1.0)


def _groups(
    model: nn.Module, weight_decay: float, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("the model has no parameters to train")
    found = []
    for start, factor in factors.items():
        if factor != 1:
            own = [trained.pop(name) for name in [*trained] if name.startswith(start)]
            found += [{**group, FACTOR: factor} for group in _by_decay(own, weight_decay)]
    return _by_decay([*trained.values()], weight_decay) + found


def _by_decay(trained: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weights, and apart from them biases and norms' scales, which must not decay."""
    if not weight_decay:
        return [{"params": [*trained]}] if trained else []
    weights = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True, slots=True)
class RateFactor:
    """What the highest learning rate is multiplied by in the step after so many epochs.

    >>> factor = RateFactor(ScheduleConfig(warmup_epochs=1, decay="polynomial"), 4, num_epochs=3)
    >>> [factor(epochs) for epochs in (0, 0.25, 0.75, 1, 2, 3)]
    [0.25, 0.5, 1.0, 1.0, 0.5, 0.0]
    """

    config: ScheduleConfig
    steps_per_epoch: int
    num_epochs: float
    """The whole run, which decay lasts for unless the settings say otherwise."""
    first_epoch: float = 0
    """Where it begins."""

    def __call__(self, epochs: float) -> float:
        epochs -= self.first_epoch
        warmup = self.config.warmup_epochs
        if epochs < warmup:
            return min(1.0, (epochs + 1 / self.steps_per_epoch) / warmup)
        end = self.config.decay_epochs or self.num_epochs
        return self._decayed((epochs - warmup) / max(end - warmup, 1 / self.steps_per_epoch))

    def _decayed(self, share: float) -> float:
        """After ``share`` of the decay, which stays at its end."""
        final, rest = self.config.final, 1 - min(1.0, max(0.0, share))
        if self.config.decay == "polynomial":
            return float(final + (1 - final) * rest**self.config.power)
        if self.config.decay == "cosine":
            return final + (1 - final) * (1 - math.cos(math.pi * rest)) / 2
        return 1.0
