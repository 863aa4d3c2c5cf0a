"""What a machine can do: rates, memory, links and disks, each value with its source."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError, FormatError, did_you_mean

FOLDER = Path(__file__).parent / "machines"
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Link:
    """What carries messages between two GPUs."""

    latency_seconds: float
    """However little is sent."""
    bytes_per_second: float
    """In one direction."""
    hop_seconds: float = 0.0
    """Of a small part that a sum over ranks, once begun, passes on; 0 where it is a message."""

    @property
    def hop(self) -> float:
        return self.hop_seconds or self.latency_seconds

    def seconds(self, nbytes: float) -> float:
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes that are all alike. Rates are per second, of what one process gets."""

    name: str
    gpu: str
    memory_nbytes: float
    """Of a GPU, or a process's share of the host's."""
    bytes_per_second: float
    """Of its memory, reading and writing."""
    flops_per_second: Mapping[str, float]
    """Of large products, by precision."""
    kernel_seconds: float
    """That a kernel takes however small it is."""
    launch_seconds: float
    """Of the host, for a kernel in a step that is not recorded."""
    step_seconds: float
    """Of the host, for a step that is recorded."""
    half_channels: float
    """With as many channels a convolution reaches half of the rate, along each of the two sides."""
    variation: float
    """The standard deviation of GPUs' speeds, as a share of the mean."""
    fuses: bool
    """Whether convolution, activation and pool are one kernel."""
    gpus_per_node: int
    inside: Link
    """Within a node."""
    between: Link
    """Between nodes, for a GPU that has a NIC to itself."""
    nics_per_node: int
    trees: bool
    """Whether sums over ranks may go by trees rather than rings, where latency counts most."""
    host_bytes_per_second: float
    """From host memory to a GPU, for one of a node's whose all copy."""
    files_bytes_per_second: float
    """From the parallel file system, for a node."""
    all_files_bytes_per_second: float
    """And for all nodes together."""
    disk_bytes_per_second: float
    """From a disk of the node."""
    cores_per_node: int = 0
    """On which processes take turns, each on one; 0 where each has a GPU."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each value is from."""

    def rate(self, precision: str) -> float:
        return self.flops_per_second[precision]

    @property
    def node_bytes_per_second(self) -> float:
        """Out of a node, by all its NICs."""
        return self.nics_per_node * self.between.bytes_per_second


NUMBERS = {
    "gpu": ("memory_nbytes", "bytes_per_second", "kernel_seconds", "half_channels", "variation"),
    "host": ("launch_seconds", "step_seconds"),
    "data": (
        "host_bytes_per_second",
        "files_bytes_per_second",
        "all_files_bytes_per_second",
        "disk_bytes_per_second",
    ),
}
"""The tables of a machine's file, and the values in each that are numbers with a source."""
OPTIONAL = (
    "gpu.fuses",
    "between.trees",
    "node.cores",
    "inside.hop_seconds",
    "between.hop_seconds",
)
"""What a machine's file may leave out."""


def known_machines() -> Sequence[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_machine(name: str | Path) -> Machine:
    """A machine by its name, or from a TOML file."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.exists():
            hint = did_you_mean(str(name), known_machines(), "; ")
            raise ConfigError(
                f"there is no machine {str(name)!r}{hint} (there are "
                f"{', '.join(known_machines())}, or give a TOML file)"
            )
    try:
        read = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FormatError(f"{path}: {error}") from error
    try:
        return _machine(_Values(read))
    except ValueError as error:
        raise FormatError(
            f"{path} does not describe a machine: {error} (see {FOLDER / 'laptop.toml'})"
        ) from error


class _Values:
    """The numbers and words in a machine's file, by the names of their tables and their own."""

    def __init__(self, read: Mapping[str, Any]) -> None:
        self._read = dict(_flat(read))
        self.sources: dict[str, str] = {}

    def number(self, name: str, default: float | None = None) -> float:
        """One above 0, given as such or as a table with its source."""
        if default is not None and name not in self._read:
            return default
        given = self._take(name)
        value = given.get("value") if isinstance(given, Mapping) else given
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
        self.sources[name] = str(given.get("source", "")) if isinstance(given, Mapping) else ""
        return float(value)

    def count(self, name: str, default: float | None = None) -> int:
        value = self.number(name, default)
        if not value.is_integer():
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        return int(value)

    def word(self, name: str) -> str:
        return str(self._take(name))

    def switch(self, name: str, *, default: bool) -> bool:
        value = self._read.pop(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value

    def finish(self) -> None:
        """Raises where there is more than was asked for: a name may be misspelt."""
        if self._read:
            known = [*self.sources, *OPTIONAL]
            name = min(self._read)
            raise ValueError(f"{name} is not known{did_you_mean(name, known, '; ')}")

    def _take(self, name: str) -> Any:
        if name not in self._read:
            raise ValueError(f"{name} is missing")
        return self._read.pop(name)


def _flat(read: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in read.items():
        if isinstance(value, Mapping) and "value" not in value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _machine(values: _Values) -> Machine:
    links = [
        Link(
            values.number(f"{table}.latency_seconds"),
            values.number(f"{table}.bytes_per_second"),
            values.number(f"{table}.hop_seconds", default=0.0),
        )
        for table in ("inside", "between")
    ]
    found = Machine(
        name=values.word("name"),
        gpu=values.word("gpu.name"),
        flops_per_second={each: values.number(f"gpu.flops.{each}") for each in PRECISIONS},
        fuses=values.switch("gpu.fuses", default=False),
        gpus_per_node=values.count("node.gpus"),
        nics_per_node=values.count("node.nics"),
        cores_per_node=values.count("node.cores", default=0.0),
        trees=values.switch("between.trees", default=True),
        inside=links[0],
        between=links[1],
        sources=values.sources,
        **{name: values.number(f"{t}.{name}") for t, names in NUMBERS.items() for name in names},
    )
    values.finish()
    return found


def describe_sources(machine: Machine) -> list[tuple[str, str]]:
    """The values of a machine and where they are from, for a table."""
    return [*machine.sources.items()]


assert {name for names in NUMBERS.values() for name in names} <= {f.name for f in fields(Machine)}
