"""Whether passes of a signature are worth a recording, which ``cuda_graphs="auto"`` goes by.

The first passes run as ever. One of them is timed, and their backward passes are watched for what
recorded passes cannot do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperslab.nn.outputs import tensors_of
from hyperslab.torch_private import backward_pass_id

HOST_SHARE = 0.5
"""Of the GPU's time for a forward pass: if the host takes less, the GPU does not wait for it."""

SPARE_TIMES = 2
"""How often what a pass keeps must fit into free memory, as recordings hold theirs for good."""


class PassCost(NamedTuple):
    """What a forward pass took."""

    host_ms: float
    """To launch it."""
    gpu_ms: float
    """From its first kernel to its last: not less than ``host_ms`` where the GPU waits."""
    kept_nbytes: int
    """What is kept of it for the backward pass."""
    free_nbytes: int
    """Before it, on the GPU."""

    def objection(self) -> str:
        """Why such passes are not recorded, or nothing."""
        if self.host_ms < HOST_SHARE * self.gpu_ms:
            return (
                f"the GPU took {self.gpu_ms:.1f} ms for a forward pass and the host "
                f"{self.host_ms:.1f} ms, so that little would be gained"
            )
        if self.kept_nbytes * SPARE_TIMES > self.free_nbytes:
            return (
                f"it keeps {self.kept_nbytes / 2**30:.2f} GiB, which a recording would hold for "
                f"good, and {self.free_nbytes / 2**30:.2f} GiB were free"
            )
        return ""


class CudaMeter:
    """Measures a forward pass on ``device``; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begun = self._host_ms = 0.0
        self._kept = self._free = 0

    def begin(self) -> None:
        held = torch.cuda.memory_allocated(self._device)
        cached = torch.cuda.memory_reserved(self._device) - held
        self._kept, self._free = -held, torch.cuda.mem_get_info(self._device)[0] + cached
        self._first.record(torch.cuda.current_stream(self._device))
        self._begun = time.perf_counter()

    def end(self) -> None:
        self._host_ms = (time.perf_counter() - self._begun) * 1e3
        self._last.record(torch.cuda.current_stream(self._device))
        self._kept += torch.cuda.memory_allocated(self._device)

    def read(self) -> PassCost | None:
        """What the pass took; None as long as the GPU is at it."""
        if not self._last.query():
            return None
        gpu_ms = self._first.elapsed_time(self._last)
        return PassCost(self._host_ms, gpu_ms, self._kept, self._free)


class PassTrial:
    """Ordinary passes of one signature, until it is known whether to record them."""

    def __init__(self, meter: CudaMeter) -> None:
        self._meter, self._is_timed = meter, False
        self._seen = ""

    def run(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run`` returns; the first such pass is measured."""
        if self._is_timed:
            return self.watched(run(*args, **kwargs))
        self._is_timed = True
        self._meter.begin()
        out = run(*args, **kwargs)
        self._meter.end()
        return self.watched(out)

    def watched(self, out: Any) -> Any:
        """``out``, of whose backward passes it is noted what a recorded pass would refuse."""
        passes: set[int] = set()

        def note(grad: Tensor) -> None:
            passes.add(backward_pass_id())
            if torch.is_grad_enabled():
                self._seen = "gradients of its gradients are taken"
            elif len(passes) > 1 and not self._seen:
                self._seen = "a forward pass has several backward passes"

        for tensor in tensors_of(out):
            if tensor.grad_fn is not None:
                tensor.register_hook(note)
        return out

    def objection(self) -> str | None:
        """Why passes are not recorded, nothing if they are to be, None if it is not known yet."""
        if self._seen or not self._is_timed:
            return self._seen or None
        cost = self._meter.read()
        return None if cost is None else cost.objection()
