"""Where a loader is, as a small dict that can be saved and loaded on another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.io.schedule import Position, Schedule

NUMBERS = ("epoch", "sample", "seed", "num_samples", "num_shares", "batch_size")


def saved(schedule: Schedule, at: Position) -> dict[str, Any]:
    return {
        "epoch": at.epoch,
        "sample": at.sample,
        "seed": schedule.seed,
        "shuffle": schedule.shuffle,
        "num_samples": schedule.num_samples,
        "num_shares": schedule.num_shares,
        "batch_size": schedule.batch_size,
    }


def restored(schedule: Schedule, state: Mapping[str, Any]) -> tuple[Schedule, Position]:
    """The schedule that ``state`` was saved with, and the place in it, if it can go on there."""
    _check(state)
    for name in ("num_samples", "shuffle"):
        if state[name] != getattr(schedule, name):
            raise ConfigError(
                f"the state was saved with {name}={state[name]!r}, but the loader has "
                f"{getattr(schedule, name)!r}: the order of samples would be another"
            )
    if schedule.shuffle == "local" and state["batch_size"] != schedule.batch_size:
        raise ConfigError(
            f"the state was saved with batch_size={state['batch_size']}, on which the order of "
            f"shuffle='local' depends, but the loader has {schedule.batch_size}"
        )
    schedule = replace(schedule, seed=state["seed"], num_shares=state["num_shares"])
    return schedule, schedule.checked(Position(state["epoch"], state["sample"]))


def _check(state: object) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state of a loader is a dict, got {type(state).__name__}")
    if missing := [name for name in (*NUMBERS, "shuffle") if name not in state]:
        raise ConfigError(f"this is not the state of a loader: it has no {', '.join(missing)}")
    for name in NUMBERS:
        if not isinstance(state[name], int):
            raise ConfigError(f"the state of a loader has {name}={state[name]!r}, no whole number")
