"""One rank of a mesh whose other ranks do not exist: its compute, without their messages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu.cases import Case
from gpu.trial import Setting, Trial

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.messages import Pending
from hyperslab.kernels import faces
from hyperslab.layout import AXES, Grid, Layout, Split, cut_evenly
from hyperslab.nn.slab import Slab

FETCH = import_module("hyperslab.comm.fetch")  # its package names the function so


@dataclass
class Traffic:
    """What the rank would have sent and received."""

    messages: int = 0
    sent: int = 0
    received: int = 0


class _Silence:
    """A group whose other ranks say nothing."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


class _LoneMesh(Mesh):
    def group_over(self, axes):
        sizes = {axis: self.grid.size(axis) for axis in axes}
        size, rank = 1, 0
        for axis, num in sizes.items():
            size, rank = size * num, rank * num + self.coords[axis]
        return _Silence(size, rank)


def lone_mesh(axes: dict[str, int], device: torch.device) -> Mesh:
    """As a rank in the middle sees it, which has neighbours on all sides."""
    grid = Grid(tuple(axes.get(axis, 1) for axis in AXES))
    middle = {axis: grid.size(axis) // 2 for axis in AXES}
    rank = next(r for r, coords in enumerate(grid.coords) if dict(coords) == middle)
    return _LoneMesh(grid, rank, device, "cpu:gloo,cuda:nccl", timedelta(seconds=60))


@contextmanager
def nobody_answers() -> Iterator[Traffic]:
    """Within it, boxes from other ranks are zeros that are there at once."""
    traffic = Traffic()

    def post(pieces, sends, receives, dtype, mesh, doing):
        received = faces.zeros_for([m.box.shape for m in receives], dtype, mesh.device)
        traffic.messages += len(sends)
        traffic.sent += sum(piece.nbytes for piece in pieces)
        traffic.received += sum(box.nbytes for box in received)
        return Pending([], [], received, mesh, doing)

    def gather(boxes, mine, group):
        for box in boxes:
            box.copy_(mine)

    with (
        patch.object(FETCH, "post_messages", post),
        patch.object(dist, "all_reduce", lambda *args, **kwargs: None),
        patch.object(dist, "all_gather", gather),
    ):
        yield traffic


class LoneTrial(Trial):
    """A network with this rank's piece of its batch, ready to step: forward, loss, backward."""

    def __init__(
        self, case: Case, axes: dict[str, int], setting: Setting, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.mesh = lone_mesh(axes, device)
        layout = _split(case.shape, axes)
        shape, memory = layout.box(self.mesh.coords).shape, setting.format_of(len(case.shape))
        self.model = case.make().to(device, memory_format=memory)
        self.x = torch.empty(shape, device=device, memory_format=memory)
        self.input = Slab(self.x, layout, self.mesh)
        target = case.make_target(device)
        self.target = Slab(target, Layout(case.target, (None,) * len(case.target)), self.mesh)

    def block_times(self) -> list[dict[str, float]]:
        """The milliseconds of each block of the features, forward and backward.

        They end where the next one's begin, by the blocks' outputs and the gradients of these.
        """
        clock, forward, backward = Clock(self.device), [], []

        def after(block, args, out: Slab) -> None:
            forward.append(clock.read())
            if out.local.requires_grad:
                out.local.register_hook(lambda grad: backward.append(clock.read()))

        hooks = [block.register_forward_hook(after) for block in self.model.features]
        forward.append(clock.read())
        self.step()
        backward.append(clock.read())
        for hook in hooks:
            hook.remove()
        passes = [clock.between(forward), clock.between(backward)[::-1]]
        pairs = zip(*passes, strict=True)
        return [{"forward_ms": f, "backward_ms": b} for f, b in pairs]


class Clock:
    """Times on the device, in the order of what was launched."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def read(self) -> object:
        if not self.on_gpu:
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, times: list) -> list[float]:
        """The milliseconds between one and the next."""
        if not self.on_gpu:
            return [b - a for a, b in pairwise(times)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(times)]


def _split(shape: tuple[int, ...], axes: dict[str, int]) -> Layout:
    splits: list[Split | None] = [None] * len(shape)
    for axis, num in axes.items():
        dim = AXES.index(axis)
        if num > 1:
            splits[dim] = Split(axis, cut_evenly(shape[dim], num))
    return Layout(shape, tuple(splits))
