"""What makes a trainer of a run one of several in a tournament."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hyperslab.comm.mesh import Mesh
from hyperslab.io import Dataset
from hyperslab.store import Loader
from hyperslab.train.checkpoint_state import Parts
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import Config
from hyperslab.train.tournament.match import Match
from hyperslab.train.tournament.settings import with_values
from hyperslab.train.tournament.shares import divide
from hyperslab.train.tournament.tournament import Tournament

SEED_STRIDE = 1_000_003
"""From the seed of one trainer to that of the next: their weights and orders differ."""


class Seat:
    """The place of one trainer in a tournament."""

    def __init__(self, tournament: Tournament, config: Config, resume_step: int | None) -> None:
        self.tournament, self.resume_step = tournament, resume_step
        self.asked = config
        """The settings of the whole."""
        self.held_out: Loader | None = None
        self.ahead = 0
        """Steps that the model has had beyond those of this trainer."""
        self._steps: dict[int, int] = {}
        """Of checkpoints, by the number of the match before."""

    @property
    def number(self) -> int:
        return self.tournament.trainer

    @property
    def is_shown(self) -> bool:
        """Whether the user sees its progress: of one trainer, not of all at once."""
        return self.number == 0 or self.tournament.comes_back

    def config(self, folder: Path) -> Config:
        """The settings of this trainer's own run."""
        asked, number = self.asked, self.number
        seed = asked.train.seed + SEED_STRIDE * number
        return with_values(
            replace(
                asked,
                train=replace(asked.train, seed=seed),
                mesh=asked.mesh_of(number),
                run=replace(asked.run, folder=str(folder)),
            ),
            self.tournament.values,
        )

    def divide(self, whole: Dataset) -> dict[str, Dataset]:
        """The parts of this trainer."""
        return divide(self.asked.tournament, self.asked.train.seed, self.number, whole)

    def sit_down(self, mesh: Mesh) -> None:
        """Meets the other trainers. Collective over all ranks of all trainers."""
        self.tournament.sit_down(mesh)

    def is_due(self, step: int, num_matches: int) -> bool:
        return step // self.tournament.every > num_matches

    def play(
        self,
        step: int,
        parts: Parts,
        score: Callable[[], float],
        poll: Callable[[], object],
        checkpoints: Checkpoints,
    ) -> Match | None:
        """The match that is due after ``step``; None if ``poll`` told to stop.

        Checkpoints stay until all who play have later ones, so that all can go on from one match.
        """
        game = self.tournament
        checkpoints.wait()
        common = game.others.lowest("saved", game.number)
        checkpoints.since = max((s for n, s in self._steps.items() if n <= common), default=0)
        game.steps, game.model_steps = step, step + self.ahead
        match = game.play(parts, score, poll)
        if match is not None:
            self.ahead = game.model_steps - step
            self._steps[match.number] = step
        return match

    def adjusted(self, config: Config) -> Config:
        """``config`` with the hyperparameters of the model that goes on here."""
        return with_values(config, self.tournament.values)

    def state_dict(self) -> dict[str, Any]:
        return {**self.tournament.state_dict(), "ahead": self.ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tournament.load_state_dict({key: state[key] for key in state if key != "ahead"})
        self.ahead = int(state["ahead"])


def give_settings(optimizer: Optimizer, config: Config) -> None:
    """Gives an optimizer the options that may change while it works; its rate comes with steps."""
    settings = config.optimizer
    for group in optimizer.param_groups:
        group.update({key: each for key, each in settings.options.items() if key in group})
        if group.get("weight_decay"):  # not that of biases
            group["weight_decay"] = settings.weight_decay


def tell(text: str) -> None:
    """A line for the user, whichever trainer is the one to say it."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - there is no progress to print by
