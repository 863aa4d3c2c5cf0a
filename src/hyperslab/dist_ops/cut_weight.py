"""The gradient of this rank's part of a weight that is cut over ranks.

On pieces it is that of the sum of all ranks' losses: as many times that of one process as the
weight is cut in. To divide it afterwards is a pass over all of it, into new memory. A product that
makes the gradient can do so meanwhile.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def part_of_cut(part: Tensor, num: int) -> Tensor:
    """``part`` of a weight that is cut in ``num``; its gradient is divided on the way back."""
    if num == 1:
        return part
    out: Tensor = _Part.apply(part, num)  # type: ignore[no-untyped-call]
    out._undivided = part, num  # type: ignore[attr-defined]
    return out


def undivided(part: Tensor) -> tuple[Tensor, int]:
    """``part`` for who divides its gradient, and by how much."""
    found: tuple[Tensor, int] = getattr(part, "_undivided", (part, 1))
    return found


def divide(grad: Tensor, num: int) -> Tensor:
    """The gradient of one process, of that of the sum of all ranks' losses.

    Its own gradient is once more that of a sum. So the way back does not scale.
    """
    return _Divide.apply(grad, num) if num > 1 else grad  # type: ignore[no-untyped-call]


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, num: int) -> Tensor:
        ctx.num = num
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return divide(grad, ctx.num), None


class _Divide(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, num: int) -> Tensor:
        return grad / num

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
