"""Fused Triton kernels: where they are taken instead of PyTorch's, and how they are launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WANTED = os.environ.get("HYPERSLAB_FUSED") != "0"
"""Unless the user does without them, as those must who differentiate gradients."""
FASTER_ON = {(9, 0)}
"""The compute capabilities of GPUs on which they were measured to be right and faster."""
MIN_NUMEL = 1 << 21
"""Smaller tensors gain less than a launch costs the host."""


def pays(x: Tensor) -> bool:
    """Whether fused kernels of ``x``, or of a tensor of its size, are faster than PyTorch's."""
    return (
        x.is_cuda
        and x.numel() >= MIN_NUMEL
        and type(x) is Tensor  # and not one without memory, in a graph
        and is_measured(x.device)
    )


def defers_pieces(x: Tensor) -> bool:
    """Whether convolutions of split tensors with pieces like ``x`` wait for a pool after them.

    Ranks must agree on that: the size of a piece does not matter.
    """
    return x.is_cuda and type(x) is Tensor and is_measured(x.device)


def is_measured(device: torch.device) -> bool:
    """Whether fused kernels were measured on GPUs like ``device``, and can run."""
    return WANTED and _has_triton() and _capability(device) in FASTER_ON


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


_capability = lru_cache(torch.cuda.get_device_capability)


ALIGNED = 16
"""Bytes: Triton compiles for tensors that begin at a multiple of them, and again for others."""


class Launch:
    """A kernel with all that it is given after its tensors, which are on a known device.

    For every call of a kernel Triton looks at all arguments, to find what it has compiled for
    their like. Here only tensors differ from call to call, by dtype and by where they begin: what
    was compiled for such ones is kept, and called by itself.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        numbers: Sequence[int],
        constants: Mapping[str, Any],
        options: Mapping[str, int] | None = None,
    ) -> None:
        """The ``constants`` are the last of the kernel's parameters; ``options`` the compiler's.

        What was compiled has the constants inside, and only wants something in their places.
        """
        self.kernel, self.grid = kernel, grid + (1,) * (3 - len(grid))
        self.device = device if device.type == "cuda" else None  # else Triton's interpreter
        self.named = {**constants, **(options or {})}
        self.numbers, self.after = tuple(numbers), (*numbers, *constants.values())
        self.compiled: dict[tuple[object, ...], Callable[..., object]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if self.device is None or self.device.index == torch.cuda.current_device():
            self._run(tensors)
        else:
            with torch.cuda.device(self.device):
                self._run(tensors)

    def _run(self, tensors: tuple[Tensor | None, ...]) -> None:
        key = tuple([t if t is None else (t.dtype, t.data_ptr() % ALIGNED) for t in tensors])
        run = self.compiled.get(key)
        if run is not None:
            run(*tensors, *self.after)
            return
        found = self.kernel[self.grid](*tensors, *self.numbers, **self.named)
        if found is not None:  # as it is in the interpreter
            self.compiled[key] = found[self.grid]


LAST_TURN = 0.35
"""What the last programs take, however few they are, where a full turn takes 1."""


def turns(programs: int, at_once: int) -> float:
    """How long ``programs`` take of which a device runs so many ``at_once``."""
    full, rest = divmod(programs, at_once)
    return full + (LAST_TURN + (1 - LAST_TURN) * rest / at_once if rest else 0)


def power_of_two(number: int) -> int:
    """The smallest that is not less than ``number``."""
    return 1 << (number - 1).bit_length()
