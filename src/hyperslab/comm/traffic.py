"""How many bytes this rank sends to others, for who asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hyperslab.layout import Message


class Traffic:
    """What is sent while somebody counts."""

    def __init__(self) -> None:
        self.is_counted = False
        self.nbytes = 0

    def add_boxes(self, messages: Sequence[Message], itemsize: int) -> None:
        self.nbytes += sum(message.box.numel for message in messages) * itemsize

    def add_sum(self, nbytes: int, num_ranks: int) -> None:
        """That of a sum over ranks, each of which sums a part and sends it to all."""
        self.nbytes += 2 * nbytes * (num_ranks - 1) // num_ranks


traffic = Traffic()


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Within it ``nbytes`` grows with what is sent."""
    traffic.is_counted, traffic.nbytes = True, 0
    try:
        yield traffic
    finally:
        traffic.is_counted = False
