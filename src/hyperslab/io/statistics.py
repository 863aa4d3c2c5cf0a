"""Statistics of all values of a data set: exact, and the same on any number of ranks.

Mean and deviation are made of sums over pieces of samples, which are added without rounding.
Percentiles are order statistics, found digit by digit: values are numbered in their order, each
pass over the files counts 16 bits of these numbers, and the next looks where the wanted ones lie.
So values of 8 and 16 bits take one pass, of 32 two, of 64 four.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io.copying import Meter, Progress
from hyperslab.io.dataset import Dataset
from hyperslab.io.engine.threads import for_each
from hyperslab.io.engine.tiles import grain_of, tiles
from hyperslab.io.measures import ChannelStatistics, Statistics
from hyperslab.io.sharing import Ranks, on_all
from hyperslab.layout import Box, Span

PERCENTILES = (0.5, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.5)
NUM_BINS = 64
PIECE_NUMEL = 1 << 22
"""Values that a thread holds at a time."""
DIGIT = 16
"""Bits that are counted in one pass."""
FEW = 8
"""Fewer values than counters by this factor are counted one by one."""
NONZERO = "nonzero"

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]


def with_statistics(
    dataset: Dataset,
    mesh: Ranks | None = None,
    *,
    foreground: str | None = None,
    percentiles: Sequence[float] = PERCENTILES,
    progress: Progress | None = None,
) -> Dataset:
    """The same samples, with the statistics of all their values kept in the manifest.

    ``Loader(..., normalize="standard")`` then takes mean and deviation from there. Values that are
    not finite do not count. The result is the same to the last bit on any number of ranks.

    Args:
        dataset: All samples of it are read.
        mesh: Whose ranks share the work; each reads other pieces. Collective over them.
        foreground: What counts alone: ``nonzero`` values, or those where the label map of this name
            is above 0; all, if not given.
        percentiles: From 0 to 100, interpolated between neighbours as by NumPy.
        progress: Is told how many bytes this rank has read, and of how many.
    """
    _check(dataset, foreground, percentiles)
    order = Order(dataset.dtype)
    boxes = on_all(lambda: _boxes(dataset), mesh)[0]
    pieces = [(index, box) for index in range(len(dataset)) for box in boxes]
    mine = pieces[mesh.rank :: mesh.num_ranks] if mesh else pieces
    itemsize = dataset.dtype.itemsize
    nbytes = order.num_digits * itemsize * sum(box.numel for _, box in mine)
    scan = _Scan(dataset, foreground, mine, Meter(nbytes, progress))
    num_channels = dataset.shape[0] if "C" in dataset.spec.axes.letters else 1
    searches = [_Search(order) for _ in range(num_channels)]
    for number in range(order.num_digits):
        found = on_all(lambda: scan.run(searches), mesh)
        for search, *of_ranks in zip(searches, *found, strict=True):
            search.advance(of_ranks, percentiles, is_first=number == 0)
    statistics = Statistics(
        array=dataset.spec.name,
        num_samples=len(dataset),
        foreground=foreground,
        channels=tuple(search.result() for search in searches),
    )
    return Dataset(replace(dataset.manifest, statistics=statistics))


def _check(dataset: Dataset, foreground: str | None, percentiles: Sequence[float]) -> None:
    if dataset.dtype.kind not in "biuf" or dataset.dtype.itemsize > 8:
        raise ConfigError(f"values of {dataset.dtype} have no order, and so no percentiles")
    if not all(0 <= each <= 100 for each in percentiles):
        raise ConfigError(f"percentiles must lie in 0 to 100, got {list(percentiles)}")
    if foreground in (None, NONZERO):
        return
    spec = dataset.arrays.get(foreground)
    if spec is None or spec is dataset.spec or not spec.is_cut:
        maps = [each.name for each in dataset.arrays.values() if each.is_cut][1:]
        raise ConfigError(
            f"foreground = {foreground!r} must be {NONZERO!r} or a label map with the samples' "
            f"extents: there are {', '.join(maps) or 'none'}"
        )


def _boxes(dataset: Dataset) -> list[Box]:
    """The same pieces of every sample, whoever reads them."""
    spec = dataset.spec
    grain = grain_of(dataset.reader(0, spec.name))[-spec.axes.ndim :]
    in_order = tuple(grain[dim] for dim in spec.axes.order)
    return list(tiles(Box.whole(spec.shape), in_order, PIECE_NUMEL))


class Order:
    """Values of a dtype as whole numbers that are ordered like them.

    >>> order = Order(np.dtype("f4"))
    >>> keys = order.keys(np.array([-2.5, -0.5, 0, 7], "f4"))
    >>> bool((np.diff(keys.astype(object)) > 0).all()), [order.value(int(key)) for key in keys]
    (True, [-2.5, -0.5, 0.0, 7.0])
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._sign = 1 << (dtype.itemsize * 8 - 1)
        self._all = (1 << (dtype.itemsize * 8)) - 1
        self.num_digits = max(1, dtype.itemsize * 8 // DIGIT)

    def keys(self, values: NDArray[Any]) -> Keys:
        bits = np.ascontiguousarray(values).view(self._bits)
        if self._dtype.kind == "i":
            bits = bits ^ self._bits.type(self._sign)
        elif self._dtype.kind == "f":
            flips = np.where(bits & self._bits.type(self._sign), self._all, self._sign)
            bits = bits ^ flips.astype(self._bits)
        return bits.astype(np.uint64)

    def value(self, key: int) -> float:
        if self._dtype.kind == "i":
            key ^= self._sign
        elif self._dtype.kind == "f":
            key ^= self._sign if key & self._sign else self._all
        return float(np.array(key, self._bits).view(self._dtype))

    def digit(self, keys: Keys, number: int) -> Keys:
        """16 bits of each, counted from the most significant."""
        shift = DIGIT * (self.num_digits - 1 - number)
        return (keys >> np.uint64(shift)) & np.uint64((1 << DIGIT) - 1)

    def head(self, keys: Keys, number: int) -> Keys:
        """What comes before that digit."""
        if number == 0:
            return np.zeros_like(keys)
        return keys >> np.uint64(DIGIT * (self.num_digits - number))


@dataclass
class _Counted:
    """What a pass has found of one channel, in the pieces of one rank."""

    counts: Counts
    """(prefixes, digits)."""
    sums: list[tuple[int, float, float]] = field(default_factory=list)
    """Of each piece: how many values, their sum, and their squared distances from its mean."""
    low: float = math.inf
    high: float = -math.inf
    not_finite: int = 0
    bins: Counts = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))

    def count(self, places: Counts) -> None:
        """Adds one at each of ``places``, rows and digits in one number."""
        flat = self.counts.reshape(-1)
        if len(places) * FEW < len(flat):
            np.add.at(flat, places, 1)
        else:
            flat += np.bincount(places, minlength=len(flat))


class _Search:
    """The order statistics of one channel, as far as they are known, and what else is."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.number = 0
        """Of the digit that is counted next."""
        self.prefixes: Keys = np.zeros(1, np.uint64)
        self.low = self.high = 0.0
        self._places: dict[int, tuple[int, int]] = {}
        """By the place in the order of all values: the digits so far, and the place behind them."""
        self._percentiles: Sequence[float] = ()
        self._sums: list[tuple[int, float, float]] = []
        self._not_finite = 0
        self._bins: Counts = np.zeros(NUM_BINS, np.int64)

    @property
    def _count(self) -> int:
        return sum(num for num, *_ in self._sums)

    def count(self, values: NDArray[Any], lock: threading.Lock, found: _Counted) -> None:
        """Adds the values of a piece to what this pass has found."""
        finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        places = self._counted_places(self.order.keys(finite))
        sums = _sums_of(finite) if self.number == 0 else None
        bins = _binned(finite, self.low, self.high) if self.number == 1 else 0
        with lock:
            found.count(places)
            found.bins += bins
            if sums:
                found.sums.append(sums)
                found.low = min(found.low, float(finite.min()))
                found.high = max(found.high, float(finite.max()))
            found.not_finite += values.size - finite.size

    def _counted_places(self, keys: Keys) -> Counts:
        """Where each of the values counts that begin like one of the prefixes."""
        digit = self.order.digit(keys, self.number).astype(np.int64)
        if self.number:
            head = self.order.head(keys, self.number)
            rows = np.minimum(np.searchsorted(self.prefixes, head), len(self.prefixes) - 1)
            is_wanted = self.prefixes[rows] == head
            digit = (rows[is_wanted] << DIGIT) + digit[is_wanted]
        return digit

    def advance(
        self, of_ranks: Sequence[_Counted], percentiles: Sequence[float], *, is_first: bool
    ) -> None:
        """One digit more is known, by the counts of all ranks."""
        counts = np.sum([each.counts for each in of_ranks], axis=0)
        if is_first:
            self._begin(of_ranks, percentiles)
        if self.order.num_digits == 1:
            self._bins = self._bins_of_counts(counts[0])
        elif self.number == 1:
            self._bins = np.sum([each.bins for each in of_ranks], axis=0)
        running = counts.cumsum(axis=1)
        for place, (prefix, behind) in self._places.items():
            row = running[int(np.searchsorted(self.prefixes, np.uint64(prefix)))]
            digit = int(np.searchsorted(row, behind, side="right"))
            before = int(row[digit - 1]) if digit else 0
            self._places[place] = (prefix << DIGIT) + digit, behind - before
        heads = sorted({prefix for prefix, _ in self._places.values()}) or [0]
        self.prefixes = np.array(heads, np.uint64)
        self.number += 1

    def _begin(self, of_ranks: Sequence[_Counted], percentiles: Sequence[float]) -> None:
        self._sums = [sums for each in of_ranks for sums in each.sums]
        self._not_finite = sum(each.not_finite for each in of_ranks)
        self._percentiles = percentiles
        if self._count:
            self.low = min(each.low for each in of_ranks)
            self.high = max(each.high for each in of_ranks)
            wanted = {place for each in percentiles for place in _neighbours(each, self._count)}
            self._places = {place: (0, place) for place in wanted}

    def _bins_of_counts(self, counts: Counts) -> Counts:
        keys = np.flatnonzero(counts)
        values = np.array([self.order.value(int(key)) for key in keys])
        bins = np.zeros(NUM_BINS, np.int64)
        np.add.at(bins, _bin_numbers(values, self.low, self.high), counts[keys])
        return bins

    def result(self) -> ChannelStatistics:
        count = self._count
        mean = math.fsum(total for _, total, _ in self._sums) / count if count else None
        spread = [squares for *_, squares in self._sums]
        spread += [num * (total / num - (mean or 0.0)) ** 2 for num, total, _ in self._sums]
        return ChannelStatistics(
            count=count,
            not_finite=self._not_finite,
            minimum=self.low if count else None,
            maximum=self.high if count else None,
            mean=mean,
            std=math.sqrt(math.fsum(spread) / count) if count else None,
            percentiles={
                f"{each:g}": self._percentile(each) for each in self._percentiles if count
            },
            histogram=tuple(self._bins.tolist()) if math.isfinite(self.high - self.low) else (),
        )

    def _percentile(self, percentile: float) -> float:
        below, above = _neighbours(percentile, self._count)
        low, high = (self.order.value(self._places[place][0]) for place in (below, above))
        part = percentile / 100 * (self._count - 1) - below
        step = high - low
        return high - step * (1 - part) if part >= 0.5 else low + step * part


def _neighbours(percentile: float, count: int) -> tuple[int, int]:
    """The places in the order of all values between which a percentile lies."""
    below = math.floor(percentile / 100 * (count - 1))
    return below, min(below + 1, count - 1)


def _sums_of(values: NDArray[Any]) -> tuple[int, float, float] | None:
    if not values.size:
        return None
    total = float(values.sum(dtype=np.float64))
    distances = values.astype(np.float64).ravel()
    distances -= total / values.size
    return values.size, total, float(distances @ distances)


def _binned(values: NDArray[Any], low: float, high: float) -> Counts:
    return np.bincount(_bin_numbers(values, low, high), minlength=NUM_BINS)


def _bin_numbers(values: NDArray[Any], low: float, high: float) -> Counts:
    """The bin of each value, of equal width from ``low`` to ``high``."""
    if not 0 < high - low < math.inf:
        return np.zeros(values.shape, np.int64)
    parts = (values.astype(np.float64) - low) / (high - low) * NUM_BINS
    return np.clip(parts.astype(np.int64), 0, NUM_BINS - 1)


@dataclass(frozen=True)
class _Scan:
    """Passes over the pieces that this rank reads."""

    dataset: Dataset
    foreground: str | None
    pieces: Sequence[tuple[int, Box]]
    meter: Meter

    def run(self, searches: Sequence[_Search]) -> list[_Counted]:
        """What one pass finds of every channel."""
        found = [
            _Counted(np.zeros((len(search.prefixes), 1 << DIGIT), np.int64)) for search in searches
        ]
        lock = threading.Lock()

        def scan(piece: tuple[int, Box]) -> None:
            first, channels = self._channels(*piece)
            for number, values in enumerate(channels, start=first):
                searches[number].count(values, lock, found[number])
            self.meter.add(piece[1].numel * self.dataset.dtype.itemsize)

        for_each(scan, self.pieces)
        return found

    def _channels(self, index: int, box: Box) -> tuple[int, list[NDArray[Any]]]:
        """The number of the first channel of a piece, and the values of each that count."""
        values = self.dataset.read(index, box)
        has_channels = "C" in self.dataset.spec.axes.letters
        channels = list(values if has_channels else values[None])
        first = box.spans[0].start if has_channels else 0
        if self.foreground is None:
            return first, [channel.ravel() for channel in channels]
        if self.foreground == NONZERO:
            return first, [channel[channel != 0] for channel in channels]
        spec = self.dataset.arrays[self.foreground]
        space = box.spans[has_channels:]
        own = Box((Span(0, spec.shape[0]), *space)) if "C" in spec.axes.letters else Box(space)
        labels = self.dataset.read(index, own, array=spec.name) > 0
        is_in = labels.any(axis=0) if "C" in spec.axes.letters else labels
        return first, [channel[is_in] for channel in channels]
