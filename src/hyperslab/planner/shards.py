"""What the busiest rank of a mesh holds, reads and makes of every layer, along each dim."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from hyperslab.layout import AXES, Cuts, Span, cut_evenly, output_cuts
from hyperslab.layout.window import Reads
from hyperslab.planner.network import INPUT, Network

MOST_FUSED = 3
"""The largest kernel of a pool that is computed together with the activation before it."""


@dataclass(frozen=True, slots=True)
class DimShard:
    """One dim of a layer, cut over ranks: the largest numbers that any rank has."""

    holds: int
    """Of the input, indices that a rank owns."""
    fetches: int
    """And that it needs from others."""
    num_peers: int
    """From as many ranks."""
    makes: int
    """Of the output."""


@lru_cache(maxsize=4096)
def dim_shards(network: Network, dim: int, num: int) -> tuple[DimShard | None, ...]:
    """For every layer, along the spatial ``dim`` cut over ``num`` ranks; None where it has none."""
    cuts: dict[int, Cuts] = {INPUT: cut_evenly(network.extents[dim], num)}
    found: list[DimShard | None] = []
    for number, layer in enumerate(network.layers):
        source = next((each for each in layer.inputs if each in cuts), None)
        if not network.is_spatial(number) or source is None:
            found.append(None)
            continue
        before, extent = cuts[source], layer.shape[1 + dim]
        if layer.windows and dim < len(layer.windows):
            after, shard = _windowed(layer.windows, dim, before)
            if after.extent == extent:
                cuts[number] = after
                found.append(shard)
                continue
        after = before if before.extent == extent else cut_evenly(extent, num)
        cuts[number] = after
        found.append(DimShard(_most(before), 0, 0, _most(after)))
    return tuple(found)


@lru_cache(maxsize=4096)
def _windowed(windows: tuple[Reads, ...], dim: int, before: Cuts) -> tuple[Cuts, DimShard]:
    """The cuts of the outputs along ``dim``, each of which reads a window of the inputs."""
    window = windows[dim]
    after = output_cuts(window, before)
    fetches, peers = 0, 0
    for coord, (owned, made) in enumerate(zip(before.spans, after.spans, strict=True)):
        if not made.size:
            continue
        reads = window.reads(made)
        reads = Span(max(0, reads.start), min(before.extent, reads.stop))
        missing = reads.size - (owned & reads).size
        if missing:
            fetches = max(fetches, missing)
            peers = max(peers, _num_peers(before, coord, reads))
    return after, DimShard(_most(before), fetches, peers, _most(after))


def _num_peers(cuts: Cuts, coord: int, reads: Span) -> int:
    """How many pieces but that of ``coord`` have something of ``reads``."""
    first = bisect_right(cuts.bounds, reads.start) - 1
    last = bisect_left(cuts.bounds, reads.stop)
    return sum(1 for c in range(first, last) if c != coord and cuts.spans[c].size)


def _most(cuts: Cuts) -> int:
    return max(b - a for a, b in pairwise(cuts.bounds))


@dataclass(frozen=True)
class Cut:
    """How many ranks there are along each axis."""

    sizes: tuple[int, ...]
    """In the order of ``AXES``."""

    def size(self, axis: str) -> int:
        return self.sizes[AXES.index(axis)]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def axes(self) -> dict[str, int]:
        """What ``hyperslab.init`` takes."""
        return {axis: size for axis, size in zip(AXES, self.sizes, strict=True) if size > 1}

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.axes.items()) or "one rank"

    def stride(self, axis: str) -> int:
        """How many ranks apart two neighbours along ``axis`` are."""
        return math.prod(self.sizes[AXES.index(axis) + 1 :])


@dataclass(frozen=True)
class Shards:
    """What the busiest rank has of a batch of ``num_samples``."""

    network: Network
    cut: Cut
    num_samples: int

    @cached_property
    def samples(self) -> int:
        """Of the batch, on the rank that has most."""
        return -(-self.num_samples // self.cut.size("sample"))

    @cached_property
    def dims(self) -> tuple[tuple[DimShard, ...], ...]:
        """Along the spatial dims of every layer; none where it has not those of a sample."""
        sizes = [self.cut.size(axis) for axis in self.network.axes]
        each = [dim_shards(self.network, dim, num) for dim, num in enumerate(sizes)]
        rows = zip(*each, strict=True) if each else [()] * len(self.network.layers)
        return tuple(() if None in row else row for row in rows)

    def channels(self, number: int) -> int:
        """Of a layer's output."""
        whole = self.network.shape_of(number)
        return -(-whole[0] // self.cut.size("channel")) if whole else 1

    @cached_property
    def made(self) -> tuple[int, ...]:
        """The elements of each layer's output."""
        return tuple(self._made(number) for number in range(len(self.network.layers)))

    def _made(self, number: int) -> int:
        layer, dims = self.network.layers[number], self.dims[number]
        if not dims:
            rest = layer.numel // max(1, layer.channels)
            return self.samples * self.channels(number) * rest
        return self.samples * self.channels(number) * math.prod(each.makes for each in dims)

    @cached_property
    def sample(self) -> int:
        """The elements of this rank's part of its samples."""
        held = [
            -(-extent // self.cut.size(axis))
            for extent, axis in zip(self.network.extents, self.network.axes, strict=True)
        ]
        return self.samples * self.channels(INPUT) * math.prod(held)

    def numel(self, number: int) -> int:
        """Of the output of a layer, or of the sample."""
        return self.sample if number == INPUT else self.made[number]

    def gathers(self, number: int) -> bool:
        """Whether a layer has ranks gather the channels of its input: those are fewer bytes."""
        return self._meets_channels(number) and self._has_smaller_input(number)

    def scatters(self, number: int) -> bool:
        """Whether it adds up instead what ranks made of its output."""
        return self._meets_channels(number) and not self._has_smaller_input(number)

    def _has_smaller_input(self, number: int) -> bool:
        return self.numel(self.network.layers[number].inputs[0]) <= self.made[number]

    def _meets_channels(self, number: int) -> bool:
        """Whether a layer needs channels that other ranks hold, as a group of its own does not."""
        layer, num = self.network.layers[number], self.cut.size("channel")
        if num == 1 or layer.family not in ("conv", "dense"):
            return False
        return layer.groups == 1 or layer.groups % num > 0

    @cached_property
    def most_fetched(self) -> int:
        """The elements of the largest halo."""
        return max(map(self.fetched, range(len(self.network.layers))), default=0)

    def fetched(self, number: int) -> int:
        """The elements of a layer's halo."""
        dims = self.dims[number]
        if not any(each.fetches for each in dims):
            return 0
        held = math.prod(each.holds for each in dims)
        read = math.prod(each.holds + each.fetches for each in dims)
        channels = self.channels(self.network.layers[number].inputs[0])
        return (read - held) * channels * self.samples

    def share(self, number: int) -> float:
        """Of the work of one sample in a layer, spread over space, that the busiest rank has."""
        layer, dims = self.network.layers[number], self.dims[number]
        if not dims:
            return 1.0
        return math.prod(d.makes / e for d, e in zip(dims, layer.shape[1:], strict=True) if e)

    @cached_property
    def fused_pools(self) -> dict[int, float]:
        """Pools that GPUs compute together with the activation before, and the bytes they keep.

        That is a bit of every input of an average, a byte of every output of a maximum.
        """
        found = {}
        for number, layer in enumerate(self.network.layers):
            if layer.family != "pool" or len(layer.windows) < 2:
                continue
            kernels = [getattr(window, "kernel", MOST_FUSED + 1) for window in layer.windows]
            if max(kernels) <= MOST_FUSED:
                read = self.numel(layer.inputs[0])
                found[number] = read / 8 if "avg" in layer.op else float(self.made[number])
        return found
