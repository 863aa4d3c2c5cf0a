"""Who plays whom, who goes on, and how hyperparameters change: the same on all trainers by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyperslab.errors import ConfigError, check_choice

METHODS = ("pairs", "population")
CARRIED = ("optimizer", "step", "rng")

Values = Mapping[str, float]
"""Hyperparameters by name."""
Ranges = Mapping[str, Sequence[float]]
"""The lowest and the highest value of hyperparameters."""

_PAIRS, _SELECTION, _START, _CHANGE = range(4)
"""What random numbers are drawn for."""


def pairs_of(playing: Sequence[int], seed: int, number: int) -> list[tuple[int, int]]:
    """Random pairs of those ``playing`` match ``number``; of an odd number one is left out.

    >>> pairs_of([0, 1, 2, 3, 4], seed=0, number=1)
    [(1, 3), (2, 4)]
    """
    drawn = _generator(seed, _PAIRS, number).permutation(sorted(playing)).tolist()
    pairs = zip(drawn[::2], drawn[1::2], strict=False)
    return sorted((min(pair), max(pair)) for pair in pairs)


def partner_of(trainer: int, playing: Sequence[int], seed: int, number: int) -> int | None:
    """Whom ``trainer`` plays against, or None: it has a bye."""
    for first, second in pairs_of(playing, seed, number):
        if trainer in (first, second):
            return second if trainer == first else first
    return None


def is_better(score: float, other: float, *, higher_is_better: bool) -> bool:
    """Whether ``score`` beats ``other``; what is no finite number loses."""
    if not math.isfinite(score):
        return False
    if not math.isfinite(other):
        return True
    return score > other if higher_is_better else score < other


def select(
    scores: Mapping[int, float],
    fraction: float,
    seed: int,
    number: int,
    *,
    higher_is_better: bool,
) -> dict[int, int]:
    """Whose model each of the last takes over: truncation selection.

    The last ``fraction`` of the trainers, and those whose scores are no finite numbers, take a
    random one of the first ``fraction``.

    >>> select({0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}, 0.25, seed=0, number=1, higher_is_better=False)
    {1: 0}
    """
    sign = -1 if higher_is_better else 1
    well = [trainer for trainer, score in scores.items() if math.isfinite(score)]
    ranked = sorted(well, key=lambda trainer: (sign * scores[trainer], trainer))
    if not ranked or len(scores) < 2:
        return {}
    num = min(max(1, math.floor(fraction * len(scores))), len(scores) // 2)
    first = ranked[:num]
    last = [*ranked, *sorted(scores.keys() - {*well})][-num:]
    losing = sorted({*last, *(scores.keys() - {*well})} - {*first})
    generator = _generator(seed, _SELECTION, number)
    return {trainer: first[int(generator.integers(len(first)))] for trainer in losing}


def first_values(ranges: Ranges, seed: int, trainer: int) -> dict[str, float]:
    """What a trainer begins with: evenly spread over the logarithm, if the range is above 0."""
    generator, found = _generator(seed, _START, trainer), {}
    for name, (low, high) in ranges.items():
        share = float(generator.random())
        if low > 0:
            found[name] = _within(low * (high / low) ** share, low, high)
        else:
            found[name] = _within(low + (high - low) * share, low, high)
    return found


def first_settings(
    ranges: Mapping[str, Sequence[float]],
    starts: Mapping[str, float | Sequence[float]],
    seed: int,
    trainer: int,
) -> dict[str, float]:
    """What the hyperparameters of a trainer begin with."""
    given = {
        name: float(each[trainer]) if isinstance(each, Sequence) else float(each)
        for name, each in starts.items()
    }
    return {**first_values(ranges, seed, trainer), **given}


def changed_values(
    values: Values, ranges: Ranges, factor: float, seed: int, number: int, trainer: int
) -> dict[str, float]:
    """Each value that has a range multiplied or divided by ``factor``, never out of the range."""
    generator, found = _generator(seed, _CHANGE, number, trainer), dict(values)
    for name, (low, high) in ranges.items():
        up = bool(generator.integers(2))
        found[name] = _within(values[name] * (factor if up else 1 / factor), low, high)
    return found


def check_rules(
    *,
    trainers: int,
    every: int,
    method: str,
    carry: Sequence[str],
    perturb: float | None,
    fraction: float,
    prefix: str = "",
) -> None:
    """Raises ``ConfigError`` for what cannot be played; ``prefix`` is put before names."""
    if trainers < 1:
        raise ConfigError(f"{prefix}trainers must be at least 1, got {trainers}")
    if every < 1:
        raise ConfigError(f"{prefix}every must be at least 1, got {every}")
    check_choice(f"{prefix}method", method, METHODS)
    for what in carry:
        check_choice(f"{prefix}carry", what, CARRIED)
    if perturb is not None and not 1 <= perturb < math.inf:
        raise ConfigError(
            f"{prefix}perturb must be at least 1, got {perturb}: values are "
            "multiplied or divided by it"
        )
    if not 0 < fraction <= 0.5:
        raise ConfigError(f"{prefix}fraction must be above 0 and at most 0.5, got {fraction}")


def check_ranges(ranges: Mapping[str, object], prefix: str = "") -> dict[str, tuple[float, float]]:
    """The ranges as pairs of numbers; raises ``ConfigError`` for what is none."""
    found = {}
    for name, ends in ranges.items():
        if not _is_pair(ends):
            raise ConfigError(
                f"{prefix}ranges: {name} must be the lowest and the highest value, such as "
                f"[0.0001, 0.01], got {ends!r}"
            )
        low, high = (float(end) for end in ends)  # type: ignore[attr-defined]
        if low > high:
            raise ConfigError(
                f"{prefix}ranges: {name} goes from {low:g} to {high:g}, but its low end must not "
                "be above its high end: swap them"
            )
        found[name] = (low, high)
    return found


def check_starts(
    values: Mapping[str, float | Sequence[float]],
    ranges: Mapping[str, tuple[float, float]],
    trainers: int,
) -> dict[str, float | Sequence[float]]:
    """The first values as given; raises ``ConfigError`` for what no trainer can begin with."""
    for name, each in values.items():
        numbers: list[Any] = [*each] if isinstance(each, Sequence) else [each] * trainers
        if len(numbers) != trainers:
            raise ConfigError(
                f"values: {name} has {len(numbers)} numbers for {trainers} trainers: give one for "
                "each, or one for all"
            )
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ConfigError(f"values: {name} must be finite numbers, got {each!r}")
        low, high = ranges.get(name, (-math.inf, math.inf))
        if outside := [number for number in numbers if not low <= number <= high]:
            raise ConfigError(
                f"values: {name} = {outside[0]:g} lies outside of its range, {low:g} to {high:g}"
            )
    return dict(values)


def _is_pair(ends: object) -> bool:
    return (
        isinstance(ends, list | tuple)
        and len(ends) == 2
        and all(type(end) in (int, float) and math.isfinite(end) for end in ends)
    )


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _generator(seed: int, *words: int) -> np.random.Generator:
    return np.random.default_rng([seed, *words])
