"""Measured times of kernels and messages, kept by device and version."""

from __future__ import annotations

import json
import math
import os
import platform
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hyperslab.errors import FormatError
from hyperslab.planner.machine import Link, Machine
from hyperslab.planner.shards import Shards
from hyperslab.planner.stages import signature, stages

MEASURED = "measured by hyperslab plan calibrate"


class KernelRow(NamedTuple):
    """A stage on a piece of a sample, in seconds."""

    ranks: int
    """As many computed at the same time, on one node."""
    numel: int
    """Of the input."""
    forward: float
    backward: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on one kind of machine."""

    device: str
    torch: str
    hyperslab: str
    kernels: Mapping[str, tuple[KernelRow, ...]] = field(default_factory=dict)
    """By precision and the signature of a stage."""
    links: Mapping[int, Link] = field(default_factory=dict)
    """Within a node, by the number of ranks that talk at the same time."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Of a ``Machine``, by their names."""

    def machine(self, base: Machine, ranks: int) -> Machine:
        """``base`` with what was measured, for as many ranks a node."""
        known = [num for num in sorted(self.links) if num >= ranks] or sorted(self.links)[-1:]
        found = {name: value for name, value in self.values.items() if hasattr(base, name)}
        if known:
            found["inside"] = self.links[known[0]]  # type: ignore[assignment]
        sources = {**base.sources, **dict.fromkeys(found, MEASURED)}
        return replace(base, **found, sources=sources)  # type: ignore[arg-type]

    def kernel_times(
        self, shards: Shards, number: int, precision: str
    ) -> tuple[float, float] | None:
        """Of a layer, by the size of a rank's piece, between and beyond those measured.

        The first layer of a stage has the times of all; None where it was not measured.
        """
        stage = stage_of(shards, number)
        rows = self.kernels.get(f"{precision}: {signature(shards.network, stage)}")
        if rows is None:
            return None
        if number != stage[0]:
            return 0.0, 0.0
        num_channels = shards.cut.size("channel")
        numel = shards.numel(shards.network.layers[number].inputs[0]) * num_channels
        alike = _rows_of(rows, shards.cut.num_ranks)
        sizes = [row.numel for row in alike]
        forward, backward = (
            _interpolate(sizes, seconds, numel) / num_channels
            for seconds in ([row.forward for row in alike], [row.backward for row in alike])
        )
        return forward, backward


def stage_of(shards: Shards, number: int) -> tuple[int, ...]:
    return next(stage for stage in stages(shards.network) if number in stage)


def _rows_of(rows: Sequence[KernelRow], ranks: int) -> list[KernelRow]:
    """Those that were measured with as many ranks at a time, or the nearest number of them."""
    nearest = min({row.ranks for row in rows}, key=lambda num: abs(math.log2(num / ranks)))
    return sorted((row for row in rows if row.ranks == nearest), key=lambda row: row.numel)


def _interpolate(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """On a line through the two nearest, both axes logarithmic; below the smallest, the smallest's
    time; beyond the largest, in proportion.

    >>> _interpolate([10, 100], [1.0, 10.0], 1000)
    100.0
    """
    if size <= sizes[0]:
        return seconds[0]
    if size >= sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    after = bisect_left(sizes, size)
    low, high = sizes[after - 1], sizes[after]
    part = math.log(size / low) / math.log(high / low)
    return float(seconds[after - 1] ** (1 - part) * seconds[after] ** part)


# Files


def cpu_name() -> str:
    """By which a calibration of this machine's CPUs is kept."""
    return f"{platform.machine()} {len(os.sched_getaffinity(0))} cores"


def find_calibration(device: str | None = None) -> Calibration | None:
    """The latest of ``device``, or of any, that was kept."""
    paths = sorted(cache_folder().glob("*.json"), key=lambda path: -path.stat().st_mtime)
    found = map(load, paths)
    return next((each for each in found if device in (None, each.device)), None)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hyperslab" / "calibrations"


def path_of(device: str, torch: str, hyperslab: str) -> Path:
    """Where a calibration of that device and version is kept."""
    words = "_".join((device, torch, hyperslab))
    name = "".join(c if c.isalnum() or c in ".-_" else "-" for c in words)
    return cache_folder() / f"{name}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Adds to what the file has: later times of a stage on as many ranks replace earlier ones."""
    if path.exists():
        before = load(path)
        merged = dict(before.kernels)
        for name, rows in calibration.kernels.items():
            ranks = {row.ranks for row in rows}
            kept = [row for row in merged.get(name, ()) if row.ranks not in ranks]
            merged[name] = (*kept, *rows)
        links = {**before.links, **calibration.links}
        values = {**before.values, **calibration.values}
        calibration = replace(calibration, kernels=merged, links=links, values=values)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(_plain(calibration), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _plain(calibration: Calibration) -> dict[str, Any]:
    links = {str(num): asdict(link) for num, link in calibration.links.items()}
    return {
        "device": calibration.device,
        "torch": calibration.torch,
        "hyperslab": calibration.hyperslab,
        "values": dict(calibration.values),
        "links": links,
        "kernels": {name: [*map(list, rows)] for name, rows in calibration.kernels.items()},
    }


def load(path: Path) -> Calibration:
    try:
        read = json.loads(path.read_text())
        kernels = {
            name: tuple(KernelRow(*row) for row in rows) for name, rows in read["kernels"].items()
        }
        links = {int(num): Link(**link) for num, link in read["links"].items()}
        device, torch, hyperslab = (str(read[name]) for name in ("device", "torch", "hyperslab"))
        return Calibration(device, torch, hyperslab, kernels, links, dict(read["values"]))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{path} is no calibration ({error!r}): delete it, and calibrate again"
        ) from error
