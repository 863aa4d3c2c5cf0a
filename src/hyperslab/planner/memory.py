"""What a training step takes of a rank's memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyperslab.planner.network import INPUT, Layer, Network
from hyperslab.planner.shards import Shards

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""How many numbers an optimizer keeps for each weight."""
TILE_NUMEL = 2**29
"""The elements of the largest tensor in a tile of a chain that is computed depth first."""
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes, on the rank that needs most."""

    weights: float
    """With their gradients, and copies in the precision of a step."""
    optimizer: float
    activations: float
    """What backward passes need, and what exists besides at the moment when most does."""
    halos: float
    """Of the layer that fetches most: pieces with and without its halo exist at a time."""

    @property
    def total(self) -> float:
        return self.weights + self.optimizer + self.activations + self.halos


def step_memory(
    shards: Shards,
    *,
    precision: str,
    optimizer: str,
    fuses: bool,
    recomputed: Collection[str] = (),
) -> Memory:
    """``recomputed`` names the modules of which only the input is kept."""
    own = shards.network.num_weights / shards.cut.size("channel")
    cast = own * ITEMSIZE[precision] if precision == "bf16" else 0
    return Memory(
        own * 8 + cast,
        own * 4 * STATES[optimizer],
        _Walk(shards, precision, fuses, tuple(recomputed)).peak(),
        shards.most_fetched * ITEMSIZE[precision],
    )


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
        self, shards: Shards, precision: str, fuses: bool, recomputed: tuple[str, ...]
    ) -> None:
        self.shards, self.itemsize, self.recomputed = shards, ITEMSIZE[precision], recomputed
        self.network = shards.network
        self.fused = shards.fused_pools if fuses else {}
        self.before_pools = {pool - n for pool in self.fused for n in (1, 2)}
        self.kept: dict[int, float] = {}

    def peak(self) -> float:
        total = float(self.shards.sample * self.itemsize)
        most, begun = total, ""
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
            most = max(most, total + ends + share * (within + self._passing(number, layer)))
        return most

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
        extra = layer.keeps_nbytes * self._part(number)
        if layer.family in ("pointwise", "norm"):  # counted in float32
            extra *= self.itemsize / 4 if layer.op == "dropout" else 1
        return found | ({-2 - number: extra} if extra else {})

    def _passing(self, number: int, layer: Layer) -> float:
        """What it reads and makes, or of their gradients."""
        made = 0.0 if layer.is_in_place else self._nbytes(number)
        read = {self.network.storage_of(each) for each in layer.inputs} - {INPUT}
        return made + sum(map(self._nbytes, read))

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
