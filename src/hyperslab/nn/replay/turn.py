"""Whose activations lie in the memory that recorded passes share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from hyperslab.errors import ConfigError


class Ticket:
    """A forward pass that was replayed; its backward pass may be yet to come."""

    def __init__(self, saved: Sequence[Tensor]) -> None:
        """Of ``saved`` the backward pass needs the values that they have now."""
        self._saved, self._versions = saved, [tensor._version for tensor in saved]
        self.used = False

    def use(self) -> None:
        """Says that the backward pass comes now."""
        if self.used:
            raise ConfigError(
                "a second backward pass through one forward pass, whose activations CUDA graphs "
                "have overwritten: add up the losses and call backward once, or parallelize "
                "without cuda_graphs"
            )
        self.used = True
        if [tensor._version for tensor in self._saved] != self._versions:
            raise ConfigError(
                "weights or buffers were written into between a forward pass and its backward "
                "pass, which needs those of the forward pass: step the optimizer after the "
                "backward pass"
            )


class Turn:
    """Whose activations lie in the memory that all recorded passes share."""

    def __init__(self) -> None:
        self._holder: Callable[[], Ticket | None] = lambda: None

    @property
    def is_taken(self) -> bool:
        """Whether a backward pass may still come that needs what lies there."""
        ticket = self._holder()
        return ticket is not None and not ticket.used

    def take(self, ticket: Ticket) -> None:
        self._holder = weakref.ref(ticket)
