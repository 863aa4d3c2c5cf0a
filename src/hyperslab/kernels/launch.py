"""Launches of Triton kernels that take the host little time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
        kinds = tuple([t if t is None else (t.dtype, t.data_ptr() % ALIGNED) for t in tensors])
        run = self.compiled.get(kinds)
        if run is not None:
            run(*tensors, *self.after)
            return
        found = self.kernel[self.grid](*tensors, *self.numbers, **self.named)
        if found is not None:  # as it is in the interpreter
            self.compiled[kinds] = found[self.grid]


def power_of_two(number: int) -> int:
    """The smallest that is not less than ``number``."""
    return 1 << (number - 1).bit_length()
