"""Hyperparameters as settings of the configuration, which change while a model is trained."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.train.config import Config, OptimizerConfig
from hyperslab.train.optimizers import find_optimizer
from hyperslab.train.tournament.rules import Values, check_ranges

LIVE = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "schedule.warmup_epochs",
    "schedule.decay_epochs",
    "schedule.power",
    "schedule.final",
    "train.clip",
)
"""Settings that may change in the middle of a run, beside options of the optimizer."""

OPTIONS, CLASS_WEIGHTS = "optimizer.options.", "task.class_weights."


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted names, of tables in tables too.

    >>> dict(flat({"optimizer": {"lr": [0.1, 1]}, "schedule.power": [1, 2]}))
    {'optimizer.lr': [0.1, 1], 'schedule.power': [1, 2]}
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def ranges_of(config: Config) -> dict[str, tuple[float, float]]:
    """The ranges of hyperparameters, each of whose ends the configuration can have."""
    found = check_ranges(dict(flat(config.tournament.ranges)), "tournament.")
    for name, ends in found.items():
        check_name(name, config, "tournament.ranges")
        for end in ends:
            with_values(config, {name: end})
        if name == "optimizer.weight_decay" and ends[0] <= 0:
            raise ConfigError(
                f"tournament.ranges: {name} must be above 0, got {ends[0]:g}: without it there is "
                "one group of weights, biases among them"
            )
    return found


def starts_of(config: Config) -> dict[str, Any]:
    """The values that hyperparameters begin with, of each trainer."""
    found, num = dict(flat(config.tournament.values)), config.tournament.trainers
    for name, values in found.items():
        check_name(name, config, "tournament.values")
        numbers = [*values] if isinstance(values, Sequence) else [values] * num
        if len(numbers) != num or not all(type(each) in (int, float) for each in numbers):
            raise ConfigError(
                f"tournament.values: {name} must be a number for each of {num} trainers, got "
                f"{values!r}"
            )
        for each in numbers:
            with_values(config, {name: each})
    return found


def check_name(name: str, config: Config, setting: str) -> None:
    """Raises if there is no such setting, or it cannot change while a model is trained."""
    known = [*LIVE, *_options(config.optimizer)]
    known += [f"{CLASS_WEIGHTS}{i}" for i in range(len(config.task.class_weights))]
    if name not in known:
        raise ConfigError(
            f"{setting}: {name!r} is no setting that can change while a model is trained"
            f"{did_you_mean(name, known, '; ')} (these can: {', '.join(known)})"
        )


def _options(config: OptimizerConfig) -> list[str]:
    """The numbers among the optimizer's options, by name; those in tuples have a number behind."""
    found = []
    for key, value in _all_options(config).items():
        if isinstance(value, list | tuple):
            found += [f"{OPTIONS}{key}.{i}" for i in range(len(value))]
        elif type(value) in (int, float):
            found.append(OPTIONS + key)
    return found


def _all_options(config: OptimizerConfig) -> dict[str, Any]:
    """The options of the optimizer as they are given, or by default."""
    parameters = inspect.signature(find_optimizer(config.name)).parameters
    defaults = {key: each.default for key, each in parameters.items()}
    found = {**defaults, **config.options}
    return {key: each for key, each in found.items() if key not in ("lr", "weight_decay")}


def with_values(config: Config, values: Values) -> Config:
    """The configuration with hyperparameters in the place of its own settings."""
    for name, value in values.items():
        table, _, key = name.partition(".")
        if name.startswith(OPTIONS):
            options = {**config.optimizer.options, **_option(config.optimizer, name, value)}
            config = replace(config, optimizer=replace(config.optimizer, options=options))
        elif name.startswith(CLASS_WEIGHTS):
            weights = [*config.task.class_weights]
            weights[int(name.removeprefix(CLASS_WEIGHTS))] = value
            config = replace(config, task=replace(config.task, class_weights=tuple(weights)))
        else:
            changed: Any = replace(getattr(config, table), **{key: value})
            config = replace(config, **{table: changed})
    return config


def _option(config: OptimizerConfig, name: str, value: float) -> dict[str, Any]:
    key, _, number = name.removeprefix(OPTIONS).partition(".")
    if not number:
        return {key: value}
    entries = [*_all_options(config)[key]]
    entries[int(number)] = value
    return {key: tuple(entries)}
