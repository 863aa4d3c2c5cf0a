"""A network as the planner knows it: its operators for one sample, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hyperslab.errors import ConfigError, FormatError
from hyperslab.layout import AXES
from hyperslab.layout.window import (
    AdaptiveWindow,
    Reads,
    Resampling,
    TransposedWindow,
    UnpaddedStart,
    Window,
)

Family = Literal["conv", "dense", "pool", "resize", "norm", "pointwise", "reduce", "view", "other"]
"""What decides how an operator's time and messages are counted; ``other`` ones have no rule, and
run only on what is whole."""

WINDOWS = {
    each.__name__: each
    for each in (Window, TransposedWindow, UnpaddedStart, AdaptiveWindow, Resampling)
}
INPUT = -1
"""Stands for the sample itself among the inputs of a layer."""

SPATIAL = AXES[2:]


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of an operator. Numbers are for one sample, elements rather than bytes."""

    module: str
    """The module that called it, by its name in the network."""
    op: str
    """The torch function."""
    family: Family
    inputs: tuple[int, ...]
    """The layers whose outputs it reads, by their numbers; ``INPUT`` is the sample. The one that it
    writes into comes first."""
    shape: tuple[int, ...]
    """Of its output, channels first."""
    windows: tuple[Reads, ...] = ()
    """Along the spatial dims, where it has some."""
    groups: int = 1
    """Of channels that do not meet."""
    flops: int = 0
    """Of the forward pass, two for a multiplication and addition."""
    num_weights: int = 0
    keeps: tuple[int, ...] = ()
    """The layers whose outputs its gradient needs; ``INPUT`` is the sample."""
    keeps_nbytes: int = 0
    """What its gradient needs besides: masks, indices, statistics."""
    is_in_place: bool = False
    """Whether its output takes no memory of its own."""
    is_wide: bool = False
    """Whether it computes in float32 where others compute in bfloat16."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def channels(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, eq=False)
class Network:
    """The operators of a training step's forward pass, in the order of their calls."""

    name: str
    input_shape: tuple[int, ...]
    """Of a sample, channels first."""
    layers: tuple[Layer, ...]
    num_weights: int
    """A weight that several layers use counts once."""
    num_tensors: int = 0
    """How many weights are tensors of their own."""
    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What can be computed depth first, by the names that ``parallelize`` takes, and the modules
    that belong to each."""
    containers: frozenset[str] = frozenset()
    """Modules that are never called themselves, as lists of modules are."""

    @property
    def extents(self) -> tuple[int, ...]:
        """The spatial ones of a sample."""
        return self.input_shape[1:]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a mesh that cut the spatial dims of a sample."""
        return SPATIAL[len(SPATIAL) - len(self.extents) :]

    @property
    def input_numel(self) -> int:
        return math.prod(self.input_shape)

    def is_spatial(self, number: int) -> bool:
        """Whether the output of a layer has the spatial dims of a sample."""
        return len(self.shape_of(number)) == len(self.input_shape) > 1

    def shape_of(self, number: int) -> tuple[int, ...]:
        return self.input_shape if number == INPUT else self.layers[number].shape

    def storage_of(self, number: int) -> int:
        """The layer whose output's memory that of a layer takes."""
        while number != INPUT and self.layers[number].is_in_place:
            number = self.layers[number].inputs[0]
        return number

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The layers that read the output of each layer."""
        found: list[list[int]] = [[] for _ in self.layers]
        for number, layer in enumerate(self.layers):
            for each in {*layer.inputs} - {INPUT}:
                found[each].append(number)
        return tuple(map(tuple, found))

    def is_inside(self, number: int, name: str) -> bool:
        """Whether a layer belongs to the module or chain of that name."""
        module = self.layers[number].module
        parts = self.chains.get(name, (name,))
        return any(module == part or module.startswith(f"{part}.") for part in parts)

    @property
    def without_rule(self) -> tuple[str, ...]:
        """The functions that hyperslab refuses where they meet what is split, and their modules."""
        found = [each for each in self.layers if each.family == "other"]
        names = [f"{each.op} in {each.module}" if each.module else each.op for each in found]
        return tuple(dict.fromkeys(names))

    @property
    def flops(self) -> int:
        """Of a forward pass."""
        return sum(layer.flops for layer in self.layers)


def to_json(network: Network) -> str:
    """A line for each layer, so that changes are seen as such."""
    head = {
        "name": network.name,
        "input_shape": network.input_shape,
        "num_weights": network.num_weights,
        "num_tensors": network.num_tensors,
        "chains": network.chains,
        "containers": sorted(network.containers),
    }
    lines = ",\n".join("  " + json.dumps(_plain(layer)) for layer in network.layers)
    return json.dumps(head)[:-1] + ', "layers": [\n' + lines + "\n]}\n"


def _plain(layer: Layer) -> dict[str, Any]:
    """What is not a default."""
    defaults = Layer(layer.module, layer.op, layer.family, (), ())
    windows = [[type(each).__name__, asdict(each)] for each in layer.windows]  # type: ignore[call-overload]
    found = {
        name: getattr(layer, name)
        for name in Layer.__slots__
        if getattr(layer, name) != getattr(defaults, name)
        or name in ("module", "op", "family", "inputs", "shape")
    }
    return found | ({"windows": windows} if windows else {})


def from_json(text: str, where: str) -> Network:
    """The network that ``to_json`` wrote; ``where`` it was found is for error messages."""
    try:
        read = json.loads(text)
        layers = tuple(map(_layer, read["layers"]))
        shape = tuple(read["input_shape"])
        counts = {name: int(read[name]) for name in ("num_weights", "num_tensors")}
        chains = {name: tuple(parts) for name, parts in read.get("chains", {}).items()}
        containers = frozenset(read.get("containers", ()))
        return Network(read["name"], shape, layers, **counts, chains=chains, containers=containers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where} is no list of operators: {error!r}") from error


def _layer(read: Mapping[str, Any]) -> Layer:
    windows = tuple(WINDOWS[name](**numbers) for name, numbers in read.get("windows", ()))
    lists = {name: tuple(read.get(name, ())) for name in ("inputs", "shape", "keeps")}
    return Layer(**{**read, **lists, "windows": windows})


FOLDER = Path(__file__).parent / "networks"
"""The operators of the networks that presets train, so that no torch is needed for them."""


def shipped_names() -> Sequence[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_shipped(name: str) -> Network:
    """The network of a preset."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        raise ConfigError(
            f"there is no network {name!r} (there are {', '.join(shipped_names())}, and yours as "
            "package.module:Name with --input)"
        )
    return from_json(path.read_text(), str(path))
