"""Looks for the best partition: all meshes, cuts of single modules, recomputation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.layout import AXES
from hyperslab.planner.blocks import Block, blocks
from hyperslab.planner.cost import Costs, Job, KernelTimes, LayerCost, StepCost
from hyperslab.planner.machine import Machine
from hyperslab.planner.memory import ITEMSIZE, Memory, step_memory
from hyperslab.planner.network import INPUT, Network
from hyperslab.planner.shards import Cut, Shards

NUM_RECUT = 12
"""The best meshes, among whose cuts every part of a network may choose."""
WORTH_RECUT = 0.98
"""Of the time of the best mesh: a plan that takes longer is not worth having one."""
SPARE = 0.92
"""Of a GPU's memory: the rest is fragments, contexts and what libraries take."""


Plan = Mapping[str, Mapping[str, int]]
"""Cuts of modules that differ from the mesh, by patterns of their names."""


@dataclass(frozen=True)
class Candidate:
    """One way to train: what ``hyperslab.init`` and ``parallelize`` take, and its cost."""

    cut: Cut
    cost: StepCost
    memory: Memory
    batch: int
    plan: Plan
    depth_first: tuple[str, ...] = ()
    """Chains that are computed tile by tile, of which only inputs are kept."""
    checkpointed: tuple[str, ...] = ()
    """Modules under activation checkpoints, of which only inputs are kept."""
    why_not: str = ""
    """What it lacks."""

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Of which only inputs are kept."""
        return self.depth_first + self.checkpointed

    @property
    def mesh(self) -> dict[str, int]:
        """What ``hyperslab.init`` takes."""
        return self.cut.axes

    @property
    def options(self) -> dict[str, Any]:
        """What ``hyperslab.parallelize`` takes besides module and mesh."""
        found: dict[str, Any] = {"plan": dict(self.plan)} if self.plan else {}
        return found | ({"depth_first": list(self.depth_first)} if self.depth_first else {})

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds

    @property
    def memory_nbytes(self) -> float:
        return self.memory.total

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.step_seconds

    def __str__(self) -> str:
        cuts: dict[str, list[str]] = {}
        for name, cut in self.plan.items():
            shown = " x ".join(f"{axis}={size}" for axis, size in cut.items())
            cuts.setdefault(shown, []).append(name)
        words = [f", with {cut} for {_listed(names)}" for cut, names in cuts.items()]
        words += [f", {_listed(self.depth_first)} depth first"] if self.depth_first else []
        words += [f", checkpoints at {_listed(self.checkpointed)}"] if self.checkpointed else []
        return f"{self.cut}{''.join(words)}"


def _listed(names: Sequence[str], most: int = 4) -> str:
    """The first ones.

    >>> _listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True, repr=False)
class Found:
    """What was found for a job on as many GPUs; printed, it is a table."""

    job: Job
    machine: Machine
    gpus: int
    candidates: tuple[Candidate, ...]
    """Those that fit, the fastest first."""
    infeasible: tuple[Candidate, ...]
    """The others, those that lack least memory first."""
    single: StepCost
    """A step on one GPU, as if its memory sufficed."""
    measured: KernelTimes | None = None

    @property
    def best(self) -> Candidate:
        if not self.candidates:
            raise ConfigError(self.sentence)
        return self.candidates[0]

    def efficiency(self, candidate: Candidate) -> float:
        """How much of the speed of as many single GPUs it has."""
        return self.single.seconds / candidate.step_seconds / self.gpus

    @property
    def sentence(self) -> str:
        """The answer."""
        from hyperslab.planner.report import sentence  # which knows this module

        return sentence(self)

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def __str__(self) -> str:
        from hyperslab.planner.report import to_text

        return to_text(self)


def search(
    job: Job,
    machine: Machine,
    gpus: int,
    measured: KernelTimes | None = None,
    *,
    recut: bool = True,
) -> Found:
    """Every mesh of ``gpus`` ranks, and for the best ones a cut for each part of the network."""
    check_counts(gpus=gpus, batch=job.batch)
    costs = Costs(job, machine, measured)
    found = [_candidate(costs, cut) for cut in meshes(job.network, gpus, job.batch)]
    fitting = sorted((each for each in found if each.fits), key=_rank)
    others = sorted((each for each in found if not each.fits), key=lambda each: each.memory_nbytes)
    if recut and gpus > 1 and fitting:
        fitting = sorted([*fitting, *_recut(costs, fitting)], key=_rank)
    single = costs.step(Cut((1,) * len(AXES)))
    return Found(job, machine, gpus, tuple(fitting), tuple(others), single, measured)


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")


def has_fitting(job: Job, machine: Machine, gpus: int) -> bool:
    """Whether there is a mesh of ``gpus`` ranks on which the job fits."""
    costs = Costs(job, machine)
    all_shards = (
        Shards(job.network, cut, job.batch) for cut in meshes(job.network, gpus, job.batch)
    )
    return any(not _lacks(costs, _with_room(costs, shards)[2]) for shards in all_shards)


def _rank(candidate: Candidate) -> tuple[object, ...]:
    """The fastest first; of equal ones that whose GPUs work less, and that which cuts less.

    That is fewest dims, and then the outermost.
    """
    cost, cut = candidate.cost, candidate.cut
    busy = cost.seconds - cost.host - cost.data
    shown = [float(f"{seconds:.4g}") for seconds in (cost.seconds, busy)]
    outermost = tuple(-size for size in cut.sizes)
    return *shown, len(cut.axes) + len(candidate.plan), outermost


def meshes(network: Network, gpus: int, batch: int) -> Iterator[Cut]:
    """Those on which every rank has something of a sample: of others some would be idle."""
    limits = {"sample": batch, "channel": _most_channels(network)}
    limits |= dict(zip(network.axes, network.extents, strict=True))
    for sizes in factorizations(gpus, len(AXES)):
        if all(size <= limits.get(axis, 1) for axis, size in zip(AXES, sizes, strict=True)):
            yield Cut(sizes)


def _most_channels(network: Network) -> int:
    return max((layer.channels for layer in network.layers), default=1)


@lru_cache(maxsize=64)
def factorizations(number: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write ``number`` as a product of so many ordered factors.

    >>> factorizations(4, 2)
    ((1, 4), (2, 2), (4, 1))
    """
    if parts == 1:
        return ((number,),)
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return tuple((d, *rest) for d in divisors for rest in factorizations(number // d, parts - 1))


# One mesh, and what is computed twice where memory is short


def _candidate(costs: Costs, cut: Cut) -> Candidate:
    """With as little computed twice as memory asks for."""
    shards = Shards(costs.job.network, cut, costs.job.batch)
    depth_first, checkpointed, memory = _with_room(costs, shards)
    layers = tuple(costs.layer(shards, number) for number in range(len(shards.network.layers)))
    return Candidate(
        cut,
        costs.total(shards, layers, [*depth_first, *checkpointed]),
        memory,
        costs.job.batch,
        {},
        tuple(depth_first),
        tuple(checkpointed),
        _lacks(costs, memory),
    )


def _with_room(costs: Costs, shards: Shards) -> tuple[list[str], list[str], Memory]:
    """Chains computed depth first, modules under checkpoints, and the memory that is then taken.

    They are those that keep most, no more than have the rest fit; all where not even that helps.
    """
    network = shards.network
    names = recomputable(network, whole_channels=shards.cut.size("channel") == 1)

    def fits(num: int) -> bool:
        return not _lacks(costs, _memory(costs, shards, names[:num]))

    num = 0
    if not fits(0):
        num = bisect_left(range(len(names)), True, key=fits) if fits(len(names)) else len(names)
    depth_first = [name for name in names[:num] if name in network.chains]
    checkpointed = [name for name in names[:num] if name not in network.chains]
    return depth_first, checkpointed, _memory(costs, shards, names[:num])


def _lacks(costs: Costs, memory: Memory) -> str:
    short = memory.total - costs.machine.memory_nbytes * SPARE
    return f"lacks {short / 2**30:.3g} GiB of memory" if short > 0 else ""


def _memory(costs: Costs, shards: Shards, recomputed: Sequence[str] = ()) -> Memory:
    job = costs.job
    return step_memory(
        shards,
        precision=job.precision,
        optimizer=job.optimizer,
        fuses=costs.machine.fuses,
        on_cpu=costs.machine.cores_per_node > 0,
        recomputed=recomputed,
    )


@lru_cache(maxsize=64)
def recomputable(network: Network, *, whole_channels: bool) -> tuple[str, ...]:
    """Chains and modules whose insides can be computed twice, those that keep most first.

    Chains go tile by tile, where channels are whole; what is in none of them goes under activation
    checkpoints.
    """
    found: dict[str, Sequence[int]] = {}
    if whole_channels:
        numbers = range(len(network.layers))
        for name in network.chains:
            found[name] = [n for n in numbers if network.is_inside(n, name)]
    taken = {number for numbers in found.values() for number in numbers}
    for block in blocks(network):
        if block.name and not taken & {*block.own}:
            found[block.name] = block.own
    sizes = {name: _inside(network, numbers) for name, numbers in found.items()}
    names = [name for name, size in sizes.items() if size > 0]
    return tuple(sorted(names, key=lambda name: -sizes[name]))


def _inside(network: Network, numbers: Sequence[int]) -> int:
    """The elements between the input and the output of these layers."""
    layers = [network.layers[number] for number in numbers]
    return sum(each.numel for each in layers if not each.is_in_place) - layers[-1].numel


# A cut for each part of a network


def _recut(costs: Costs, fitting: Sequence[Candidate]) -> list[Candidate]:
    """The fastest way through the network's modules, each cut as one of the best meshes is."""
    network = costs.job.network
    states = [each.cut for each in fitting[:NUM_RECUT] if not each.recomputed]
    parts = blocks(network)
    if len(states) < 2 or not parts:
        return []
    all_shards = [Shards(network, cut, costs.job.batch) for cut in states]
    times = [
        [sum(costs.layer(shards, n).seconds for n in part.numbers) for shards in all_shards]
        for part in parts
    ]
    moves = [
        [_move(costs, shards, _sources(network, part)) for shards in all_shards] for part in parts
    ]
    way = _shortest_way(times, moves)
    if len({*way}) == 1:
        return []
    found = _recut_candidate(costs, parts, all_shards, way)
    is_worth = found.step_seconds < WORTH_RECUT * fitting[0].step_seconds
    return [found] if is_worth and found.fits else []


def _shortest_way(times: list[list[float]], moves: list[list[float]]) -> list[int]:
    """The state of each part, given what each takes in each state, and what changing to it does."""
    reached, came_by = times[0], []
    states = range(len(reached))
    for row, move in zip(times[1:], moves[1:], strict=True):
        nearest = min(states, key=reached.__getitem__)
        came = [
            state if reached[state] <= reached[nearest] + move[state] else nearest
            for state in states
        ]
        reached = [
            reached[came[state]] + (move[state] if came[state] != state else 0.0) + row[state]
            for state in states
        ]
        came_by.append(came)
    way = [min(states, key=reached.__getitem__)]
    for came in reversed(came_by):
        way.append(came[way[-1]])
    return way[::-1]


def _sources(network: Network, part: Block) -> set[int]:
    """The layers before a part that it reads."""
    read = {each for n in part.numbers for each in network.layers[n].inputs}
    return {each for each in read if INPUT < each < part.numbers[0]}


def _move(costs: Costs, after: Shards, sources: set[int]) -> float:
    """Of a fetch that re-cuts what a module reads, forward and back.

    It is infinite where a rank would get nothing of it, which is refused.
    """
    if any(_is_thin(after, each) for each in sources):
        return math.inf
    nbytes = sum(after.numel(each) for each in sources) * ITEMSIZE[costs.job.precision]
    machine = costs.machine
    inside = after.cut.num_ranks <= machine.gpus_per_node
    link = machine.inside if inside else machine.between
    share = 1 if inside else machine.gpus_per_node / machine.nics_per_node
    return 2 * (link.latency_seconds + nbytes * share / link.bytes_per_second)


def _is_thin(shards: Shards, number: int) -> bool:
    """Whether the output of a layer has fewer indices along an axis than there are ranks."""
    extents = shards.network.shape_of(number)[1:]
    sizes = shards.cut.sizes[len(shards.cut.sizes) - len(extents) :]
    return any(extent < size for extent, size in zip(extents, sizes, strict=True))


def _recut_candidate(
    costs: Costs, parts: Sequence[Block], all_shards: list[Shards], way: list[int]
) -> Candidate:
    """The mesh is that of the first part; others are named where theirs differs or changes."""
    mesh = all_shards[way[0]]
    layers: list[LayerCost] = []
    named: dict[str, Mapping[str, int]] = {}
    seconds, before = 0.0, mesh
    for part, state in zip(parts, way, strict=True):
        shards = all_shards[state]
        layers += [costs.layer(shards, n) for n in part.numbers]
        if shards.cut != before.cut:
            seconds += _move(costs, shards, _sources(costs.job.network, part))
        if shards.cut != before.cut or shards.cut != mesh.cut:
            named[part.name] = shards.cut.axes
        before = shards
    largest = max((_memory(costs, all_shards[s]) for s in {*way}), key=lambda m: m.total)
    cost = costs.total(mesh, tuple(layers), recut=seconds)
    plan = _merged(named, costs.job.network)
    why_not = _lacks(costs, largest)
    return Candidate(mesh.cut, cost, largest, costs.job.batch, plan, why_not=why_not)


def _merged(plan: Plan, network: Network) -> Plan:
    """One line for a module all of whose blocks have the same cut."""
    found: dict[str, Mapping[str, int]] = {}
    names = [block.name for block in blocks(network)]
    for name, cut in plan.items():
        parent = name.rpartition(".")[0]
        inside = [each for each in names if each.startswith(f"{parent}.")]
        is_whole = parent and all(plan.get(each) == cut for each in inside)
        is_called = parent not in network.containers
        found[(parent if is_called else f"{parent}.*") if is_whole else name] = cut
    return found
