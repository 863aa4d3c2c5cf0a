"""One rank of a mesh whose other ranks do not exist: its compute, without their messages."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu.cases import Case
from gpu.trial import Trial
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hyperslab.comm import reduce
from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops.halo_conv import HaloConv
from hyperslab.kernels import faces
from hyperslab.layout import AXES, Grid, Layout, Split, cut_evenly
from hyperslab.nn.parallel.outside_tensors import leave_to_fsdp
from hyperslab.nn.slab import Slab


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


class _Arrived:
    """Boxes of zeros that are there at once."""

    def __init__(self, shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._boxes = faces.zeros_for(shapes, dtype, device)

    def wait(self) -> list[Tensor]:
        return self._boxes


class _SilentTransport:
    """Packs what would be sent as the transport on the device does; nobody reads it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.traffic = device, Traffic()
        self.is_silent = False

    def can_sum(self, x) -> bool:
        return True

    def sum_(self, x, boxes, messages, place, limit) -> None:
        self.post_boxes(x, boxes, messages, messages, limit)
        x.add_(0)  # in the place of the kernel that adds what came

    def post_boxes(self, x, boxes, sends, receives, limit) -> _Arrived:
        return self.post_pieces(faces.pack(x, boxes), sends, receives, x.dtype, limit)

    def post_pieces(self, pieces, sends, receives, dtype, limit) -> _Arrived:
        sizes = [sum(m.box.numel for m in some) * dtype.itemsize for some in (sends, receives)]
        self.traffic.messages += len(sends)
        self.traffic.sent += sizes[0]
        self.traffic.received += sizes[1]
        return _Arrived([m.box.shape for m in receives], dtype, self.device)


class _LoneMesh(Mesh):
    def group_over(self, axes):
        sizes = {axis: self.grid.size(axis) for axis in axes}
        size, rank = 1, 0
        for axis, num in sizes.items():
            size, rank = size * num, rank * num + self.coords[axis]
        return _Silence(size, rank)


def lone_mesh(axes: dict[str, int], device: torch.device) -> Mesh:
    """As a rank in the middle sees it, which has neighbours on all sides.

    Messages go as on the device's transport.
    """
    grid = Grid(tuple(axes.get(axis, 1) for axis in AXES))
    middle = {axis: grid.size(axis) // 2 for axis in AXES}
    rank = next(r for r, coords in enumerate(grid.coords) if dict(coords) == middle)
    backend = "cpu:gloo,cuda:nccl" if axes else None
    transport: Any = _SilentTransport(device) if axes else None
    return _LoneMesh(grid, rank, device, backend, timedelta(seconds=60), transport=transport)


@contextmanager
def nobody_answers(mesh: Mesh) -> Iterator[Traffic]:
    """Within it, sums over the ranks of ``mesh`` are made of boxes of zeros; what would travel."""
    transport: Any = mesh.transport
    traffic = Traffic() if transport is None else transport.traffic

    def ranks(mesh, axes):
        groups = mesh.grid.groups(frozenset(axes) & frozenset(mesh.grid.long_axes))
        return next(tuple(group) for group in groups if mesh.rank in group)

    with (
        patch.object(reduce, "_ranks", ranks),
        patch.object(dist, "all_reduce", lambda *args, **kwargs: None),
    ):
        yield traffic


class LoneTrial(Trial):
    """A network with this rank's piece of its batch, ready to step: forward, loss, backward."""

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        axes: dict[str, int],
        memory_format: torch.memory_format,
        device: torch.device,
    ) -> None:
        """``model`` is on the device; it is that of the case."""
        self.case, self.device, self.model = case, device, model
        self.weights = [*model.parameters()]
        self.mesh = lone_mesh(axes, device)
        leave_to_fsdp(model)  # there is nobody to average gradients with
        layout, target = _split(case.shape, axes), Layout.unsplit(case.target)
        if len(case.target) > 2:
            target = _split(case.target, axes)
        shape = layout.box(self.mesh.coords).shape
        self.x = torch.empty(shape, device=device, memory_format=memory_format)
        self.input = Slab(self.x, layout, self.mesh)
        numbers = torch.randn(target.box(self.mesh.coords).shape, device=device)
        self.target = Slab(numbers, target, self.mesh)

    def parts(self) -> dict[str, Any]:
        """The milliseconds of a step's kernels, those of each block of the network, forward and
        backward, and those of convolutions whose halos are exchanged: of their interiors, which
        hide the exchange, and of the strips around these.
        """
        marks, forward, backward = Marks(self.device), [], []
        calls: dict[str, list[tuple[int, int]]] = {"interior_ms": [], "strips_ms": []}

        def after(block, args, out: Slab) -> None:
            forward.append(marks.set())
            if out.local.requires_grad:
                out.local.register_hook(lambda grad: backward.append(marks.set()))

        def step() -> None:
            forward.append(marks.set())
            self.step()
            backward.append(marks.set())

        blocks = next(part for part in self.model.children() if isinstance(part, nn.Sequential))
        hooks = [block.register_forward_hook(after) for block in blocks]
        with _timed_convolutions(marks, calls):
            marks.run(step)
        for hook in hooks:
            hook.remove()
        passes = zip(pairwise(forward), [*pairwise(backward)][::-1], strict=True)
        return {
            "ms": marks.between(0, marks.count),
            "launches": marks.launches,
            "blocks": [
                {"forward_ms": marks.between(*f), "backward_ms": marks.between(*b)}
                for f, b in passes
            ],
            **{kind: sum(marks.between(*pair) for pair in pairs) for kind, pairs in calls.items()},
        }


class Marks:
    """Moments of a run. The time between two of them is that of the kernels launched meanwhile.

    So it is the device's time, however long the host takes to launch them. Without a GPU it is the
    time that passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.count, self.launches = device.type == "cuda", 0, 0
        self._spent: list[float] = []
        """Milliseconds after each mark."""
        self._since = 0.0

    def set(self) -> int:
        """The number of a new mark."""
        if self.on_gpu:
            torch.cuda._sleep(1)  # a kernel that nothing else launches
        else:
            now = time.perf_counter()
            self._spent.append(0.0)
            if self.count:
                self._spent[self.count - 1] = (now - self._since) * 1e3
            self._since = now
        self.count += 1
        return self.count - 1

    def between(self, start: int, stop: int) -> float:
        return sum(self._spent[start:stop])

    def run(self, step: Callable[[], None]) -> None:
        """Runs what sets the marks."""
        if not self.on_gpu:
            step()
            return
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step()
            torch.cuda.synchronize()
        events = [e for e in found.events() if e.device_type == DeviceType.CUDA]
        for event in sorted(events, key=lambda event: event.time_range.start):
            if "spin_kernel" in event.name:
                self._spent.append(0.0)
            elif self._spent:
                self._spent[-1] += event.time_range.elapsed_us() / 1e3
                self.launches += 1
        if len(self._spent) != self.count:
            raise RuntimeError(f"{len(self._spent)} of {self.count} marks are in the trace")


@contextmanager
def _timed_convolutions(marks: Marks, calls: dict[str, list[tuple[int, int]]]) -> Iterator[None]:
    """Within it, the calls of convolutions with halos are noted, by what they compute."""
    forward = HaloConv.forward

    def marked(ctx, x, weight, bias, plan, settings, mesh) -> Tensor:
        settings = _MarkedSettings(settings, plan, marks, calls)
        return forward(ctx, x, weight, bias, plan, settings, mesh)

    with patch.object(HaloConv, "forward", staticmethod(marked)):
        yield


class _MarkedSettings:
    """The settings of a convolution, which mark where its calls begin and end."""

    def __init__(self, settings, plan, marks, calls) -> None:
        self._settings, self._plan, self._marks, self._calls = settings, plan, marks, calls
        self.output_shape = settings.output_shape

    def run(self, x, weight, bias, padding):
        return self._marked(padding, lambda: self._settings.run(x, weight, bias, padding))

    def run_backward(self, grad, x, weight, padding, *, wants):
        run = self._settings.run_backward
        return self._marked(padding, lambda: run(grad, x, weight, padding, wants=wants))

    def _marked(self, padding, run):
        begun = self._marks.set()
        out = run()
        kind = "strips_ms" if padding == self._plan.strip_padding else "interior_ms"
        self._calls[kind].append((begun, self._marks.set()))
        return out


def _split(shape: tuple[int, ...], axes: dict[str, int]) -> Layout:
    splits: list[Split | None] = [None] * len(shape)
    for axis, num in axes.items():
        dim = AXES.index(axis) - len(AXES)  # images have no depth
        if num > 1:
            splits[dim] = Split(axis, cut_evenly(shape[dim], num))
    return Layout(shape, tuple(splits))
