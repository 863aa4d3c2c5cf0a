"""The output of an operator on a rank that owns none of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def empty_output(shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
    """An empty tensor of ``shape`` that passes zero gradients to ``inputs``.

    Local operators refuse empty pieces, but their rank must still take part in the backward pass of
    what came before, and its weights must have a gradient.
    """
    assert 0 in shape, shape
    like = next(x for x in inputs if x is not None)
    return _zeros(like.new_empty(shape), *inputs)


def _zeros(like: Tensor, *inputs: Tensor | None) -> Tensor:
    """Zeros that pass zero gradients to ``inputs``, in gradients of gradients too."""
    out: Tensor = _Zeros.apply(like.detach(), *inputs)  # type: ignore[no-untyped-call]
    return out


class _Zeros(Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        pairs = zip(inputs, ctx.needs_input_grad[1:], strict=True)
        return None, *(_zeros(x, grad, *inputs) if wants else None for x, wants in pairs)
