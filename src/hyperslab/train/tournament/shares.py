"""The samples of each trainer, and those that models are scored on in matches."""

from __future__ import annotations

from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.io.schedule import permutation
from hyperslab.train.config import TournamentConfig

HELD_OUT = "held_out"
"""The part of the data that matches are scored on."""


def divide(config: TournamentConfig, seed: int, trainer: int, whole: Dataset) -> dict[str, Dataset]:
    """What one trainer trains on, and what it scores models on: nobody trains on that.

    Shares are of equal size, so that all trainers make as many steps; a remainder is left out.
    Every rank finds the same errors.
    """
    drawn = permutation(len(whole), seed).tolist()
    is_common = config.data == "all" or config.method == "population"
    held: list[int] = []
    if is_common:
        held, drawn = _held_out(config, drawn)
    if config.data == "share":
        size = len(drawn) // config.trainers
        drawn = drawn[trainer * size : (trainer + 1) * size]
    if not is_common:
        held, drawn = _held_out(config, drawn)
    if not drawn:
        raise ConfigError(
            f"{len(whole)} samples to train on leave none for each of {config.trainers} trainers "
            f"(tournament.held_out = {config.held_out}): add samples, set tournament.data = 'all', "
            "or have fewer trainers"
        )
    return {"train": whole.take(sorted(drawn)), HELD_OUT: whole.take(sorted(held))}


def _held_out(config: TournamentConfig, drawn: list[int]) -> tuple[list[int], list[int]]:
    """The samples to score on, one at least, and the others."""
    num = max(1, round(config.held_out * len(drawn))) if config.held_out else 0
    if not drawn[:num]:
        raise ConfigError(
            f"tournament.held_out = {config.held_out} of {len(drawn)} samples holds none out: "
            "matches need samples that the models have not learned from, so set it above 0, or "
            "add samples"
        )
    return drawn[:num], drawn[num:]
