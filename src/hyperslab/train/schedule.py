"""The learning rate over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperslab.train.config import ScheduleConfig


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

    def __call__(self, epochs: float) -> float:
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
