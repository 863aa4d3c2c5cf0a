"""Times on the device and on the host, and what the device can do at best."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyperslab.train.model import float32_products


def nothing() -> None: ...


def device_times(
    run: Callable[[], object], repeats: int, device: torch.device, before: Callable = nothing
) -> list[float]:
    """Milliseconds of each ``run`` on the device; ``before`` comes first and is not counted."""
    if device.type == "cpu":
        return host_times(run, repeats, device, before)
    pairs = []
    for _ in range(repeats):
        before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in pairs]


def host_times(
    run: Callable[[], object], repeats: int, device: torch.device, before: Callable = nothing
) -> list[float]:
    """Milliseconds until ``run`` has given its work to the device; on CPUs until it is done."""
    times = []
    for _ in range(repeats):
        before()
        synchronize(device)
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    synchronize(device)
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Ceilings:
    """The best rates of this device, measured."""

    bytes_per_second: float
    """Read and written, by a large copy."""
    flops_per_second: dict[str, float]
    """Of a large product of matrices, by precision."""

    def floor_ms(self, flops: int, nbytes: int, precision: str) -> float:
        """No step is much faster: the longer of computing and moving."""
        seconds = flops / self.flops_per_second[precision], nbytes / self.bytes_per_second
        return max(seconds) * 1e3


def measure_ceilings(device: torch.device) -> Ceilings:
    is_gpu = device.type == "cuda"
    dtypes = {"bf16": torch.bfloat16, "tf32": torch.float32}
    rates = {
        name: _product_rate(8192 if is_gpu else 128, dtype, device)
        for name, dtype in dtypes.items()
    }
    return Ceilings(_copy_rate(1 << 30 if is_gpu else 1 << 20, device), rates)


def _copy_rate(numel: int, device: torch.device) -> float:
    source, target = (torch.randn(numel, device=device) for _ in range(2))
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), device) * 1e3


def _product_rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    with float32_products("tf32"):
        return 2 * side**3 / median_ms(lambda: a @ b, device) * 1e3


def median_ms(
    run: Callable[[], object], device: torch.device, repeats: int = 10, before: Callable = nothing
) -> float:
    """The median time of ``run`` on the device, after three runs that are not counted."""
    for _ in range(3):
        before()
        run()
    return statistics.median(device_times(run, repeats, device, before))
