"""Convolutions of one process's tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hyperslab.layout import Window


class Settings(NamedTuple):
    """What a convolution needs besides tensors and padding."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output_shape(self, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> tuple[int, ...]:
        windows = map(Window, weight.shape[2:], self.stride, padding, self.dilation)
        sizes = (w.output_extent(n) for w, n in zip(windows, x.shape[2:], strict=True))
        return (x.shape[0], weight.shape[0], *sizes)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]
    ) -> Tensor:
        zeros = (0,) * len(padding)
        return torch.convolution(
            x, weight, bias, self.stride, padding, self.dilation, False, zeros, self.groups
        )

    def run_backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, ...],
        *,
        wants: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, weight and bias, as far as they are wanted."""
        zeros = (0,) * len(padding)
        return torch.ops.aten.convolution_backward.default(  # type: ignore[no-any-return]
            grad, x, weight, [weight.shape[0]], self.stride, padding, self.dilation, False, zeros,
            self.groups, wants,
        )  # fmt: skip
