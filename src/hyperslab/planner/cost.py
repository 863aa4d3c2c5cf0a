"""What a training step takes, layer by layer: kernels, messages, host, data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from hyperslab.planner.machine import Link, Machine
from hyperslab.planner.memory import ITEMSIZE, STATES
from hyperslab.planner.network import INPUT, Layer, Network
from hyperslab.planner.shards import Cut, DimShard, Shards

PASSES = {"norm": (3.0, 5.0), "pool": (2.0, 2.0), "pointwise": (2.0, 3.0)}
"""How often a layer's numbers are read or written, forward and backward; others 2 and 3."""

KernelTimes = Callable[[Shards, int, str], tuple[float, float] | None]
"""Measured seconds of a layer's kernels, forward and backward, on the busiest rank; None where
there are none."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and how."""

    network: Network
    batch: int
    """Samples in one step, over all ranks."""
    precision: str = "bf16"
    optimizer: str = "adam"
    source: str = "memory"
    """Where samples are read from: ``files``, ``disk`` (staged on the nodes), ``memory`` (of the
    ranks), or ``none``."""
    file_itemsize: int = 2
    """Bytes of a number in a file."""
    recorded: bool = True
    """Whether steps are recorded in CUDA graphs, where the machine has such."""
    bucket_nbytes: float = 25 * 2**20
    """Gradients are averaged in parts of this size, each as soon as it is complete; 0 for every
    tensor by itself."""
    whole_samples: bool = False
    """Whether one of the ranks that share a sample copies all of it to its GPU before each step and
    sends the others their parts, rather than every rank its own part during the step before."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """In seconds, of the rank that takes longest."""

    module: str
    op: str
    cut: str
    forward: float
    backward: float
    exchange: float
    """Of halos or channels, forward and backward, hidden or not."""
    exposed: float
    """What of it is not hidden behind kernels."""
    reductions: float
    nbytes: float
    """What a rank receives of others, forward and backward."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.exposed + self.reductions


@dataclass(frozen=True)
class StepCost:
    """In seconds."""

    layers: tuple[LayerCost, ...]
    gradients: float
    """Of averaging them over ranks, as far as it is not hidden."""
    optimizer: float
    host: float
    """By which the host takes longer than the GPU."""
    data: float
    """By which reading takes longer than the rest, and what the rest waits for."""
    recompute: float = 0.0
    recut: float = 0.0
    slowest: float = 0.0
    """By which the slowest GPU's kernels take longer than those of a usual one."""

    @property
    def kernels(self) -> float:
        return sum(each.forward + each.backward for each in self.layers)

    @property
    def halos(self) -> float:
        return sum(each.exposed for each in self.layers)

    @property
    def reductions(self) -> float:
        return sum(each.reductions for each in self.layers)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Where the time goes."""
        return {
            "kernels": self.kernels,
            "recompute": self.recompute,
            "slowest": self.slowest,
            "halos": self.halos,
            "reductions": self.reductions,
            "recuts": self.recut,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "host": self.host,
            "data": self.data,
        }


@dataclass(frozen=True)
class Costs:
    """Tells the time of layers and steps on a machine."""

    job: Job
    machine: Machine
    measured: KernelTimes | None = None
    _layers: dict[tuple[object, ...], LayerCost] = field(default_factory=dict, repr=False)

    def step(self, cut: Cut, recomputed: Collection[str] = ()) -> StepCost:
        """With one cut for all layers."""
        shards = Shards(self.job.network, cut, self.job.batch)
        layers = tuple(self.layer(shards, number) for number in range(len(shards.network.layers)))
        return self.total(shards, layers, recomputed)

    def total(
        self,
        shards: Shards,
        layers: tuple[LayerCost, ...],
        recomputed: Collection[str] = (),
        recut: float = 0.0,
    ) -> StepCost:
        cut, machine = shards.cut, self.machine
        own = self.job.network.num_weights / cut.size("channel")
        slower = self._slower(cut.num_ranks)
        backward = sum(each.backward * (1 + slower) + each.exposed / 2 for each in layers)
        again = sum(
            each.forward
            for number, each in enumerate(layers)
            if any(self.job.network.is_inside(number, name) for name in recomputed)
        )
        optimizer = own * 4 * (3 + 2 * STATES[self.job.optimizer]) / machine.bytes_per_second
        cost = StepCost(
            layers,
            self._gradients(cut, own * 4, backward),
            optimizer + machine.kernel_seconds * 4,
            0.0,
            0.0,
            again,
            recut,
            slower * (again + sum(each.forward + each.backward for each in layers)),
        )
        cost = replace(cost, host=max(0.0, self._host(layers) - cost.seconds))
        waited = max(0.0, self._data(shards) - cost.seconds)
        return replace(cost, data=waited + self._scatter(shards))

    def _slower(self, num: int) -> float:
        """The share by which the slowest of ``num`` GPUs is expected to be slower than the mean.

        All wait for it. Blom's approximation of the largest of normally distributed numbers.
        """
        return self.machine.variation * NormalDist().inv_cdf((num - 0.375) / (num + 0.25))

    def layer(self, shards: Shards, number: int) -> LayerCost:
        layer, cut = shards.network.layers[number], shards.cut
        key = (number, cut.sizes, shards.samples)
        if (known := self._layers.get(key)) is not None:
            return known
        measured = self.measured(shards, number, self.job.precision) if self.measured else None
        forward, backward = measured or self._kernels(shards, number, layer)
        if not measured:
            forward, backward = forward * self._turns(cut), backward * self._turns(cut)
        halo, halo_nbytes = self._halo(shards, number, layer)
        channels, channel_nbytes = self._channels(shards, number, layer)
        exposed = 0.0
        for seconds in (halo, channels):
            if seconds:
                exposed += self._exposed(seconds, forward) + self._exposed(seconds, backward / 2)
        found = LayerCost(
            layer.module,
            layer.op,
            str(cut),
            forward,
            backward,
            2 * (halo + channels),
            exposed,
            self._reductions(shards, layer),
            2 * (halo_nbytes + channel_nbytes),
        )
        self._layers[key] = found
        return found

    # Kernels

    def _turns(self, cut: Cut) -> float:
        """How many processes take turns on a core, where they have no GPUs."""
        machine = self.machine
        running = min(cut.num_ranks, machine.gpus_per_node)
        return max(1.0, running / machine.cores_per_node) if machine.cores_per_node else 1.0

    def _kernels(self, shards: Shards, number: int, layer: Layer) -> tuple[float, float]:
        """By the longer of two times: of arithmetic at a rate that channels allow, and of bytes."""
        machine, itemsize = self.machine, ITEMSIZE[self.job.precision]
        if layer.family == "view":
            return 0.0, 0.0
        read = sum(shards.numel(each) for each in layer.inputs)
        made = shards.made[number]
        if layer.family in ("conv", "dense"):
            return self._product(shards, number, layer, read, made)
        passes = PASSES.get(layer.family, (2.0, 3.0))
        if self.machine.fuses and number in shards.fused_pools:
            read = 0
        elif (
            self.machine.fuses and number + 1 in shards.fused_pools and layer.family == "pointwise"
        ):
            return 0.0, 0.0
        moved = (read + made) / 2 * itemsize / machine.bytes_per_second
        return (
            moved * passes[0] + machine.kernel_seconds,
            moved * passes[1] + machine.kernel_seconds,
        )

    def _product(
        self, shards: Shards, number: int, layer: Layer, read: float, made: float
    ) -> tuple[float, float]:
        machine, itemsize = self.machine, ITEMSIZE[self.job.precision]
        flops = layer.flops * shards.samples * shards.share(number) / shards.cut.size("channel")
        rate = machine.rate(self.job.precision) * self._efficiency(shards, number, layer)
        weights = layer.num_weights / shards.cut.size("channel")
        moved = (read + made + weights) * itemsize / machine.bytes_per_second
        once = max(flops / rate, moved) + machine.kernel_seconds
        times = 1 if layer.inputs == (INPUT,) else 2
        return once, times * once

    def _efficiency(self, shards: Shards, number: int, layer: Layer) -> float:
        """Of a convolution, by the channels that a rank reads and makes of every group."""
        if layer.family == "dense":
            return 1.0
        before = shards.network.shape_of(layer.inputs[0])[0] / layer.groups
        after = layer.channels / layer.groups
        num, half = shards.cut.size("channel"), self.machine.half_channels
        if shards.gathers(number):
            after /= num
        elif shards.scatters(number):
            before /= num
        return before / (before + half) * (after / (after + half))

    # Messages

    def _exposed(self, exchange: float, kernel: float) -> float:
        """Of an exchange beside a kernel: hidden, or waited for, whichever is shorter."""
        hidden = max(0.0, exchange - kernel) + 2 * self.machine.kernel_seconds
        return min(exchange, hidden)

    def _halo(self, shards: Shards, number: int, layer: Layer) -> tuple[float, float]:
        """Seconds and bytes of one exchange."""
        dims = shards.dims[number]
        if not dims or not any(each.fetches for each in dims):
            return 0.0, 0.0
        channels = shards.channels(layer.inputs[0]) * shards.samples
        itemsize = ITEMSIZE[self.job.precision]
        latency = seconds = nbytes = 0.0
        for dim, each in enumerate(dims):
            if each.fetches:
                face = _face(dims, dim) * channels * itemsize * each.fetches
                link = self._link(shards.cut, shards.network.axes[dim])
                latency = max(latency, link.latency_seconds)
                seconds += face / link.bytes_per_second
                nbytes += face
        return latency + seconds, nbytes

    def _channels(self, shards: Shards, number: int, layer: Layer) -> tuple[float, float]:
        """Of gathering a layer's input, or scattering its output, whichever has fewer bytes."""
        if shards.gathers(number):
            numel = shards.numel(layer.inputs[0])
        elif shards.scatters(number):
            numel = shards.made[number]
        else:
            return 0.0, 0.0
        nbytes = (shards.cut.size("channel") - 1) * numel * ITEMSIZE[self.job.precision]
        return self._link(shards.cut, "channel").seconds(nbytes), nbytes

    def _link(self, cut: Cut, axis: str) -> Link:
        """What carries messages between neighbours along ``axis``, where that is slowest.

        Ranks that leave a node share its NICs: as many as lie side by side at the node's border.
        """
        machine, stride = self.machine, cut.stride(axis)
        length = stride * cut.size(axis)
        if length <= machine.gpus_per_node and machine.gpus_per_node % length == 0:
            return machine.inside
        if cut.num_ranks <= machine.gpus_per_node:
            return machine.inside
        crossing = min(machine.gpus_per_node, stride)
        rate = min(machine.between.bytes_per_second, machine.node_bytes_per_second / crossing)
        return Link(machine.between.latency_seconds, rate)

    def _reductions(self, shards: Shards, layer: Layer) -> float:
        """Of sums over ranks that a norm or a mean needs, forward and backward."""
        if layer.family not in ("norm", "reduce"):
            return 0.0
        axes = {*shards.cut.axes} - {"channel"}
        if layer.op != "batch_norm":
            axes -= {"sample"}
        num = math.prod(shards.cut.size(axis) for axis in axes)
        local = self._local(shards.cut)
        return 0.0 if num == 1 else 2 * self.all_reduce(num, 8 * layer.channels, local=local)

    def _gradients(self, cut: Cut, nbytes: float, backward: float) -> float:
        """Of averaging over the ranks that share weights, what the backward pass does not hide.

        It cannot hide the last message, whose gradients it ends with.
        """
        num = cut.num_ranks // cut.size("channel")
        if num == 1:
            return 0.0
        local = self._local(cut)
        bucket = self.job.bucket_nbytes
        messages = math.ceil(nbytes / bucket) if bucket else self.job.network.num_tensors
        whole = self.all_reduce(num, nbytes, local=local, messages=messages)
        last = self.all_reduce(num, min(nbytes, bucket), local=local)
        return max(whole - backward, min(whole, last))

    def _local(self, cut: Cut) -> int:
        """How many of the ranks that have the same channels lie in one node."""
        inner, channels = cut.stride("channel"), cut.size("channel")
        held = self.machine.gpus_per_node
        return max(1, held // channels, min(held, inner))

    def all_reduce(
        self, num: int, nbytes: float, *, local: int | None = None, messages: int = 1
    ) -> float:
        """Of sums over ``num`` ranks, ``local`` in each node, while the others do the same.

        Bytes go once around a ring, at the rate of its slowest link, to be added, and once more to
        be told; each way a message takes num - 1 hops, of which one leaves each node. Trees take
        fewer hops, a logarithm of the nodes; within a node all GPUs reach each other.
        """
        machine = self.machine
        local = min(num, local or machine.gpus_per_node)
        nodes = -(-num // local)
        rate = machine.inside.bytes_per_second if local > 1 else math.inf
        if nodes > 1:
            rate = min(rate, machine.node_bytes_per_second * local / machine.gpus_per_node)
        hops = 2 * (num - 1)
        crossing = min(2 * nodes, hops) if nodes > 1 else 0
        around = [crossing * machine.between.hop + (hops - crossing) * machine.inside.hop]
        if machine.trees:
            deep = 2 * math.ceil(math.log2(nodes)) * machine.between.hop
            around.append(deep + 2 * (local > 1) * machine.inside.hop)
        link = machine.between if nodes > 1 else machine.inside
        return hops / num * nbytes / rate + messages * (link.latency_seconds + min(around))

    # Host and data

    def _host(self, layers: tuple[LayerCost, ...]) -> float:
        if self.job.recorded:
            return self.machine.step_seconds
        launches = sum(2 + (each.backward > each.forward) for each in layers if each.forward)
        exchanges = sum(2 for each in layers if each.exchange)
        return (launches + 3 * exchanges) * self.machine.launch_seconds

    def _data(self, shards: Shards) -> float:
        """Of reading a rank's part of a batch and copying it to the device, during a step."""
        machine, job = self.machine, self.job
        if job.source == "none":
            return 0.0
        nbytes = shards.sample * job.file_itemsize
        local = min(shards.cut.num_ranks, machine.gpus_per_node)
        nodes = -(-shards.cut.num_ranks // machine.gpus_per_node)
        copy = 0.0 if job.whole_samples else nbytes / machine.host_bytes_per_second
        if job.source == "memory":  # boxes move between ranks of other samples
            moved = nbytes * local / machine.node_bytes_per_second if nodes > 1 else 0.0
            return max(copy, moved)
        if job.source == "disk":
            return max(copy, nbytes * local / machine.disk_bytes_per_second)
        rate = min(machine.files_bytes_per_second, machine.all_files_bytes_per_second / nodes)
        return max(copy, nbytes * local / rate)

    def _scatter(self, shards: Shards) -> float:
        """Of copying whole samples to one GPU and on to the others, before a step."""
        machine, job, cut = self.machine, self.job, shards.cut
        if job.source == "none" or not job.whole_samples:
            return 0.0
        whole = job.network.input_numel * shards.samples * job.file_itemsize
        sharing = cut.num_ranks // cut.size("sample")
        local = min(sharing, machine.gpus_per_node)
        inside = whole * (local - 1) / sharing / machine.inside.bytes_per_second
        between = whole * (sharing - local) / sharing / machine.between.bytes_per_second
        return whole / machine.host_bytes_per_second + inside + between


def _face(dims: Sequence[DimShard], dim: int) -> int:
    """The area across ``dim`` of what is fetched along it, with what other dims fetch."""
    return math.prod(
        each.holds + each.fetches * (other < dim) for other, each in enumerate(dims) if other != dim
    )
