"""Seeds of random numbers in passes that are recorded: others in every replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

import torch
from torch import Tensor

from hyperslab.dist_ops.random_bits import NUM_VALUES, draw, drawing_from
from hyperslab.nn.replay.replayable import CannotReplayError


class Seeds:
    """What a pass draws, in a tensor that is filled anew before each replay.

    The numbers are those that an ordinary pass would draw, in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: Tensor | None = None
        self._num_drawn = 0

    @contextmanager
    def given(self) -> Iterator[None]:
        """Within it a pass draws from here. The first one tells how many numbers there are."""
        if self._num_drawn and self._numbers is None:
            self._numbers = torch.zeros(self._num_drawn, 2, dtype=torch.int64, device=self._device)
        self._num_drawn = 0
        with drawing_from(self._draw):
            yield

    def _draw(self) -> Tensor:
        number, self._num_drawn = self._num_drawn, self._num_drawn + 1
        if self._numbers is None:
            return draw().to(self._device)
        if number == len(self._numbers):
            raise CannotReplayError("it does not draw as many random numbers in every pass")
        return self._numbers[number]

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Within it nothing may be drawn, as in a backward pass."""

        def refuse() -> Never:
            raise CannotReplayError(
                "it draws random numbers in its backward pass, as activation checkpointing does"
            )

        with drawing_from(refuse):
            yield

    def refill(self) -> None:
        """Draws for the next replay."""
        if self._numbers is not None:
            drawn = torch.randint(NUM_VALUES, self._numbers.shape)
            self._numbers.copy_(drawn, non_blocking=True)  # CUDA reads what is not pinned at once
