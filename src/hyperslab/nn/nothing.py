"""The output of a rank that owns none of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def nothing(shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
    """An empty tensor of ``shape`` that passes zero gradients to ``inputs``.

    Local operators refuse empty pieces, but their rank must still take part in the backward pass of
    what came before, and its weights must have a gradient.
    """
    assert 0 in shape, shape
    out: Tensor = _Nothing.apply(shape, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Nothing(Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        return next(x for x in inputs if x is not None).new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad[1:]
        pairs = zip(ctx.saved_tensors, wants, strict=True)
        return None, *(torch.zeros_like(x) if want else None for x, want in pairs)
