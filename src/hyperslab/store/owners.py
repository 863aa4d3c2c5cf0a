"""Who keeps which sample."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hyperslab.io.schedule import Indices, Schedule
from hyperslab.layout import cut_evenly


@dataclass(frozen=True)
class Owners:
    """The share of the ranks that keeps each sample, and which of that share's samples it is."""

    shares: Indices
    numbers: Indices

    def num_owned(self, share: int) -> int:
        return int((self.shares == share).sum())


def assign_owners(schedule: Schedule, num_shares: int, epoch: int) -> Owners:
    """Every sample belongs to the share that takes it in ``epoch``, in the order of that epoch.

    So ranks that begin there with empty hands read what they keep, and nothing moves until the
    next epoch.
    """
    order = replace(schedule, drop_last=False).order(epoch)
    takers = np.empty(len(order), np.int64)
    size = schedule.batch_size
    num_whole = len(order) // size * size
    takers[:num_whole] = np.tile(_takers(size, num_shares), num_whole // size)
    takers[num_whole:] = _takers(len(order) - num_whole, num_shares)
    numbers = np.empty(len(order), np.int64)
    for share in range(num_shares):
        mine = takers == share
        numbers[mine] = np.arange(mine.sum())
    shares = np.empty_like(takers)
    shares[order] = takers
    by_sample = np.empty_like(numbers)
    by_sample[order] = numbers
    return Owners(shares, by_sample)


def _takers(num: int, num_shares: int) -> Indices:
    """The share that takes each of the ``num`` samples of a batch."""
    sizes = [span.size for span in cut_evenly(num, num_shares).spans]
    return np.repeat(np.arange(num_shares), sizes)
