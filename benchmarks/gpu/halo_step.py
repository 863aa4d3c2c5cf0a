"""A step of CosmoFlow's first blocks on one rank of several, traced."""

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
from gpu.clock import device_times
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import hyperslab as hs
from hyperslab.comm.messages import Pending
from hyperslab.dist_ops import halo_conv
from hyperslab.kernels import fused
from hyperslab.models import CosmoFlow

FETCH = import_module("hyperslab.comm.fetch")  # its package names the function so
STEP, POST, WAIT = "a step", "messages are posted", "messages are awaited"
NUM_BLOCKS = 3


@dataclass(frozen=True)
class Traced:
    """What a rank tells of its steps."""

    rank: int
    ms: float
    synchronizing: list[str]
    """The operations that torch says made the host wait for the GPU, in one step."""
    trace: str
    """The path of the profiler's trace of one step."""


def trace_step(
    axes: dict[str, int], size: int, width: int, folder: str, *, use_fused: bool
) -> Traced:
    """Collective over all ranks, which may share one GPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if use_fused and device.type == "cuda":
        fused.FASTER_ON.add(torch.cuda.get_device_capability(device))
    mesh = hs.init(**axes, device=device, timeout_seconds=120, transport="host")
    step = _make_step(mesh, size, width)
    name = "-".join(f"{axis}{num}" for axis, num in axes.items())
    path = Path(folder) / f"{name}_rank{mesh.rank}.json"
    for _ in range(3):
        step()
    ms = statistics.median(device_times(step, 5, device))
    synchronizing = _synchronizing(step) if device.type == "cuda" else []
    with _named_exchanges(), _profiler(device) as profiler:
        for _ in range(2):  # the first has the profiler's own delays
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return Traced(mesh.rank, ms, synchronizing, str(path))


def _make_step(mesh: hs.Mesh, size: int, width: int) -> Callable[[], None]:
    torch.manual_seed(0)
    blocks = CosmoFlow(size, base_channels=width).features[:NUM_BLOCKS]
    last = torch.channels_last_3d if mesh.device.type == "cuda" else torch.contiguous_format
    model = hs.parallelize(nn.Sequential(*blocks).to(mesh.device, memory_format=last), mesh)
    shape = (1, 4, size, size, size)
    extents = [n // mesh.grid.size(axis) for n, axis in zip(shape, mesh.coords, strict=True)]
    x = hs.from_local(torch.randn(extents, device=mesh.device), mesh, shape)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(mesh.device.type, torch.bfloat16, mesh.device.type == "cuda"):
            out = model(x)
        out.square().mean().backward()

    return step


def _synchronizing(step: Callable[[], None]) -> list[str]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    words = "called a synchronizing CUDA operation"
    return [f"{Path(w.filename).name}:{w.lineno}" for w in caught if words in str(w.message)]


@contextmanager
def _named_exchanges() -> Iterator[None]:
    """Within it, traces show where messages are posted and awaited."""

    def named(name: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            with record_function(name):
                return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for place in (halo_conv, FETCH):
            for name in ("post_fetch", "post_return"):
                stack.enter_context(patch.object(place, name, named(POST, getattr(place, name))))
        stack.enter_context(patch.object(Pending, "wait", named(WAIT, Pending.wait)))
        yield


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)
