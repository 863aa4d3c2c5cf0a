"""The order in which samples are visited: a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, check_choice
from hyperslab.layout import cut_evenly

SHUFFLES = ("global", "local", "none")
Indices = NDArray[np.int64]


class Position(NamedTuple):
    """A place in the endless row of epochs: samples of ``epoch`` before it have been visited."""

    epoch: int
    sample: int


class Batch(NamedTuple):
    """Samples that are visited together, and where the row goes on after them."""

    at: Position
    indices: tuple[int, ...]
    next: Position
    seed: int
    """Of the schedule, for whatever else is drawn."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which of ``num_samples`` samples come when, over all ranks.

    ``global`` draws a new order of all samples every epoch, ``none`` keeps theirs. ``local`` has
    ``num_shares`` of them shuffled each by itself, so that ranks along the sample axis keep to
    their own files: share ``i`` of every batch is drawn from share ``i`` of the samples.

    Orders depend on no mesh, on no number of ranks (but through ``num_shares``, which is part of
    the saved state), and on no release of NumPy.
    """

    num_samples: int
    batch_size: int
    shuffle: str = "global"
    seed: int = 0
    drop_last: bool = False
    num_shares: int = 1

    def __post_init__(self) -> None:
        check_choice("shuffle", self.shuffle, SHUFFLES)
        for name in ("num_samples", "batch_size", "num_shares"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        seed: object = self.seed
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be a whole number of 0 to 2**64 - 1, got {self.seed!r}")
        if self.drop_last and self.batch_size > self.num_samples:
            raise ConfigError(
                f"{self.num_samples} samples make no batch of {self.batch_size}, and drop_last "
                "leaves out shorter ones: every epoch would be empty"
            )

    def __len__(self) -> int:
        """The batches of one epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def order(self, epoch: int) -> Indices:
        """The samples in the order in which ``epoch`` visits them."""
        if self.shuffle == "none":
            return np.arange(self.num_samples)
        if self.shuffle == "global":
            return permutation(self.num_samples, self.seed, epoch)
        order = np.empty(self.num_samples, np.int64)
        first = 0
        for share, places in enumerate(self._share_places):
            drawn = permutation(len(places), self.seed, epoch, share)
            order[places] = first + drawn
            first += len(places)
        return order

    @cached_property
    def _share_places(self) -> list[Indices]:
        """The places in every epoch's order that each share fills; its samples are as many."""
        places: list[list[Indices]] = [[] for _ in range(self.num_shares)]
        for start in range(0, self.num_samples, self.batch_size):
            size = min(self.batch_size, self.num_samples - start)
            for share, span in enumerate(cut_evenly(size, self.num_shares).spans):
                places[share].append(np.arange(start + span.start, start + span.stop))
        return [np.concatenate(parts) for parts in places]

    def number_of(self, at: Position) -> int:
        """Of the batch that begins there, among those of all epochs."""
        return at.epoch * len(self) + at.sample // self.batch_size

    def batches(self, start: Position) -> Iterator[Batch]:
        """All batches from ``start`` on, without an end."""
        at = self.checked(start)
        while True:
            order = self.order(at.epoch)
            while (stop := self._stop(at.sample)) is not None:
                after = Position(at.epoch, stop)
                if self._stop(stop) is None:
                    after = Position(at.epoch + 1, 0)
                yield Batch(at, tuple(order[at.sample : stop].tolist()), after, self.seed)
                at = Position(at.epoch, stop)
            at = Position(at.epoch + 1, 0)

    def _stop(self, start: int) -> int | None:
        """Where the batch ends that begins at place ``start`` of an epoch; None: there is none."""
        stop = min(start + self.batch_size, self.num_samples)
        is_short = stop - start < self.batch_size
        return None if stop == start or (is_short and self.drop_last) else stop

    def checked(self, at: Position) -> Position:
        """``at``, or the start of the next epoch if nothing is left of this one."""
        if at.epoch < 0 or not 0 <= at.sample <= self.num_samples:
            raise ConfigError(
                f"epoch {at.epoch}, sample {at.sample} is no place in epochs of "
                f"{self.num_samples} samples"
            )
        return at if self._stop(at.sample) is not None else Position(at.epoch + 1, 0)


def permutation(num: int, *key: int) -> Indices:
    """The numbers ``0:num`` in an order that depends on ``key`` alone: sorted by their hashes."""
    return np.argsort(hash_words(num, *key), kind="stable")


def hash_words(num: int, *key: int) -> NDArray[np.uint64]:
    """``num`` words of 64 random bits that depend on ``key`` alone."""
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for word in key:
            state = _mixed(state ^ _mixed(np.uint64(word) + _STEP))
        words: NDArray[np.uint64] = _mixed(state + _STEP * np.arange(1, num + 1, dtype=np.uint64))
    return words


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: Any) -> Any:
    """A hash of 64-bit words: the finalizer of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def split_samples(
    num: int, parts: Mapping[str, float | Sequence[int] | Indices], seed: int = 0
) -> dict[str, Indices]:
    """Samples by part: a fraction of them, drawn by ``seed``, or those of a list.

    Every fraction but 0 gets a sample at least, if there are so many.

    >>> {k: v.tolist() for k, v in split_samples(5, {"train": 0.8, "test": 0.2}).items()}
    {'train': [0, 1, 2, 3], 'test': [4]}
    """
    listed = {name: _listed(name, part, num) for name, part in parts.items() if not _is_share(part)}
    taken = np.concatenate([*listed.values(), np.empty(0, np.int64)])
    if len(np.unique(taken)) != len(taken):
        raise ConfigError(f"a sample is listed twice in the parts {', '.join(listed)}")
    shares = {name: float(part) for name, part in parts.items() if _is_share(part)}  # type: ignore[arg-type]
    if any(not 0 <= share <= 1 for share in shares.values()) or sum(shares.values()) > 1 + 1e-9:
        raise ConfigError(f"fractions must lie in 0 to 1 and sum to at most 1, got {shares}")
    drawn = permutation(num, seed)
    drawn = drawn[~np.isin(drawn, taken)]
    for name, size in zip(shares, _sizes(list(shares.values()), len(drawn)), strict=True):
        listed[name], drawn = np.sort(drawn[:size]), drawn[size:]
    empty = [name for name, indices in listed.items() if not len(indices)]
    if empty:
        raise ConfigError(f"the parts {', '.join(empty)} of {num} samples would be empty")
    return {name: listed[name] for name in parts}


def _sizes(shares: Sequence[float], num: int) -> list[int]:
    """As many of ``num`` samples as each share is, rounded so that all of them add up."""
    bounds = np.rint(np.cumsum([0.0, *shares]) * num).astype(int)
    sizes: list[int] = np.diff(bounds).tolist()
    for part, share in enumerate(shares):
        if share and not sizes[part]:
            largest = sizes.index(max(sizes)) if sum(sizes) == num else None
            if largest is not None and sizes[largest] > 1:
                sizes[largest] -= 1
            sizes[part] = int(sum(sizes) < num)
    return sizes


def _is_share(part: object) -> bool:
    return isinstance(part, int | float)


def _listed(name: str, part: Any, num: int) -> Indices:
    indices = np.asarray(part)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ConfigError(f"part {name!r} must be a fraction or a list of sample numbers")
    outside = indices[(indices < 0) | (indices >= num)]
    if len(outside):
        raise ConfigError(f"part {name!r} lists sample {outside[0]}, but there are {num} samples")
    return indices.astype(np.int64)
