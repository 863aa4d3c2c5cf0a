"""What a training step takes of a rank's memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyperslab.planner.network import INPUT, Layer, Network
from hyperslab.planner.shards import Shards
from hyperslab.planner.workspace import conv_workspace

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""How many numbers an optimizer keeps for each weight."""
TILE_NUMEL = 2**29
"""The elements of the largest tensor in a tile of a chain that is computed depth first."""
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2}


HALOS_BESIDE = 5
"""Times the size of a layer's halo that its backward pass works with: the strips that read it are
three times as thick, their gradient leaves as a copy, and that of others comes."""
BUCKET_NBYTES = 25 << 20
"""Gradients of this size leave for other ranks in one message."""


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes, on the rank that needs most, at the moment when it does."""

    weights: float
    """With their copies in the precision of a step."""
    gradients: float
    """Those that exist by then, with the messages in which they are averaged, or with what the
    optimizer works with."""
    optimizer: float
    activations: float
    """What backward passes need, and what a layer reads, makes and works with besides."""
    halos: float
    """Of the layer that fetches most, while it runs; all that come are kept as activations."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.halos


def step_memory(
    shards: Shards,
    *,
    precision: str,
    optimizer: str,
    fuses: bool,
    on_cpu: bool = False,
    recomputed: Collection[str] = (),
) -> Memory:
    """``recomputed`` names the modules of which only the input is kept."""
    own = shards.network.num_weights / shards.cut.size("channel")
    cast = own * ITEMSIZE[precision] if precision == "bf16" else 0
    walk = _Walk(shards, ITEMSIZE[precision], fuses, on_cpu, tuple(recomputed))
    gradients = gradients_by_layer(shards)
    moments = [*zip(walk.activations(), gradients, strict=True)]
    moments += [(0.0, gradients[0]), (0.0, 4 * (own + _of_step(shards, optimizer, on_cpu)))]
    activations, gradient = max(moments, key=sum)
    return Memory(
        own * 4 + cast,
        gradient,
        own * 4 * STATES[optimizer],
        activations,
        HALOS_BESIDE * shards.most_fetched * ITEMSIZE[precision],
    )


def _of_step(shards: Shards, optimizer: str, on_cpu: bool) -> float:
    """The numbers that an optimizer works with: on CPUs for one tensor at a time, twice."""
    if STATES[optimizer] < 2:
        return 0.0
    layers = shards.network.layers
    largest = max((layer.num_weights for layer in layers), default=0)
    numbers = 2 * largest if on_cpu else shards.network.num_weights
    return numbers / shards.cut.size("channel")


def gradients_by_layer(shards: Shards) -> list[float]:
    """The bytes of gradients of weights after the backward pass of each layer.

    Ranks that share weights average them: a copy of a full bucket is on its way to the end of the
    pass, and all of them at its end, which is that of the first layer.
    """
    cut, found = shards.cut, [0.0]
    shares = cut.num_ranks > cut.size("channel")
    made, sent = 0.0, 0.0
    for layer in reversed(shards.network.layers):
        made += 4 * layer.num_weights / cut.size("channel")
        if shares and made - sent >= BUCKET_NBYTES:
            sent = made
        found.append(made + sent)
    found[-1] = made * (2 if shares else 1)
    return found[:0:-1]


def lbann_memory(network: Network) -> float:
    """The bytes of one sample as LBANN publishes them: all outputs and their gradients in float32.

    Activations have outputs of their own there. The sample counts twice: it is the output of the
    layer that reads it and of the one that hands it on.
    """
    made = sum(layer.numel for layer in network.layers if layer.family != "view")
    return 2 * 4 * (2 * network.input_numel + made)


class _Walk:
    """Through the layers in order: what is kept so far, and what passes through each besides."""

    def __init__(
        self,
        shards: Shards,
        itemsize: int,
        fuses: bool,
        on_cpu: bool,
        recomputed: tuple[str, ...],
    ) -> None:
        self.shards, self.itemsize, self.recomputed = shards, itemsize, recomputed
        self.network, self.on_cpu = shards.network, on_cpu
        self.fused = shards.fused_pools if fuses else {}
        self.before_pools = {pool - n for pool in self.fused for n in (1, 2)}
        self.kept: dict[int, float] = {}

    def activations(self) -> Iterator[float]:
        """The bytes while each layer runs, forward or backward, whichever takes more."""
        total, begun = float(self.shards.sample * self.itemsize), ""
        inside: dict[int, float] = {}
        within = 0.0
        chains = _outer(self.network, self.recomputed)
        tiles = self._tiles(chains)
        for number, layer in enumerate(self.network.layers):
            chain = chains[number]
            if chain != begun:
                inside, within, begun = {}, 0.0, chain
                place = self.network.storage_of(layer.inputs[0])
                if chain and place != INPUT:
                    total += self._keep({place: self._nbytes(place)}, self.kept)
            found = self._keeps(number, layer)
            if chain:
                found = {place: n for place, n in found.items() if place not in self.kept}
                within += self._keep(found, inside)
            else:
                total += self._keep(found, self.kept)
            share, ends = tiles.get(chain, (1.0, 0.0))
            yield total + ends + share * (within + self._passing(number, layer))

    def _tiles(self, chains: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Of chains that go tile by tile: a tile's share, and the bytes of gradients beside it.

        Those of the chain's input and output are whole.
        """
        found = {}
        for name in {*chains} & {*self.network.chains}:
            numbers = [number for number, chain in enumerate(chains) if chain == name]
            largest = max(map(self.shards.numel, numbers))
            if largest > TILE_NUMEL:
                first = self.network.layers[numbers[0]].inputs[0]
                ends = self._nbytes(numbers[-1]) + (0 if first == INPUT else self._nbytes(first))
                found[name] = TILE_NUMEL / largest, ends
        return found

    def _keep(self, found: dict[int, float], kept: dict[int, float]) -> float:
        new = {place: nbytes for place, nbytes in found.items() if place not in kept}
        kept.update(new)
        return sum(new.values())

    def _keeps(self, number: int, layer: Layer) -> dict[int, float]:
        if number in self.fused:
            return {-2 - number: self.fused[number]}
        if number in self.before_pools and layer.family == "pointwise":
            return {}
        found: dict[int, float] = {}
        for each in layer.keeps:
            place = self.network.storage_of(each)
            if place != INPUT:
                found[place] = self._nbytes(place, wide=layer.is_wide)
        if layer.family == "conv" and (halo := self.shards.fetched(number)):
            found[-2 - 2 * len(self.network.layers) - number] = halo * self.itemsize
        if self.shards.gathers(number):
            found[-2 - len(self.network.layers) - number] = self._of_others(number)
        extra = layer.keeps_nbytes * self._part(number)
        if layer.family in ("pointwise", "norm"):  # counted in float32
            extra *= self.itemsize / 4 if layer.op == "dropout" else 1
        return found | ({-2 - number: extra} if extra else {})

    def _passing(self, number: int, layer: Layer) -> float:
        """What it reads and makes, or of their gradients, and what it works with.

        What is written in place has a gradient of its own, views have that of what they show.
        """
        is_own = layer.family != "view" and number not in self.before_pools
        made = self._nbytes(number) if is_own or not layer.is_in_place else 0.0
        read = {self.network.storage_of(each) for each in layer.inputs} - {INPUT}
        work = conv_workspace(self.shards, number) * self.itemsize if self.on_cpu else 0.0
        return made + sum(map(self._nbytes, read)) + self._of_others(number) + work

    def _of_others(self, number: int) -> float:
        """What comes from ranks that hold other channels, or is made for them."""
        shards, num = self.shards, self.shards.cut.size("channel")
        if shards.gathers(number):
            return (num - 1) * self._nbytes(self.network.layers[number].inputs[0])
        if shards.scatters(number):
            read = self._nbytes(self.network.layers[number].inputs[0])
            return (num - 1) * self._nbytes(number) + read
        return 0.0

    def _nbytes(self, number: int, *, wide: bool = False) -> float:
        return self.shards.numel(number) * (4 if wide else self.itemsize)

    def _part(self, number: int) -> float:
        """Of all that a layer keeps for one sample, what this rank has for its samples."""
        return self.shards.made[number] / max(1, self.network.layers[number].numel)


@lru_cache(maxsize=256)
def _outer(network: Network, names: tuple[str, ...]) -> tuple[str, ...]:
    """For every layer that of ``names`` which is its module or has it inside; else nothing."""
    known = {part: name for name in names for part in network.chains.get(name, (name,))}
    found: dict[str, str] = {}
    for module in {layer.module for layer in network.layers}:
        parts = module.split(".")
        outer = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        found[module] = next((known[part] for part in outer if part in known), "")
    return tuple(found[layer.module] for layer in network.layers)
