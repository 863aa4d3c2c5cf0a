"""What a network costs, counted on tensors that take no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hyperslab.nn.op import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """FLOPs are those of a forward pass over one sample, two for a multiplication and addition."""

    num_parameters: int

    conv_flops: int
    """Of convolutions, also transposed ones."""

    forward_flops: int
    """Of convolutions, dense layers and other products of matrices."""

    output_shape: tuple[int, ...]
    """For one sample."""


def describe(model: nn.Module, input_shape: Sequence[int]) -> Description:
    """Counted on one sample of ``input_shape``, without the batch dim. ``model`` does not change,
    and may itself lie on the meta device.
    """
    double = _without_memory(model).eval()
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    sample = torch.empty(1, *input_shape, dtype=dtype, device="meta")
    with torch.no_grad(), _Counter() as counter:
        output = double(sample)
    return Description(
        num_parameters=sum(p.numel() for p in model.parameters()),
        conv_flops=counter.of_convolutions,
        forward_flops=counter.of_convolutions + counter.of_others,
        output_shape=tuple(output.shape[1:]),
    )


class _Counter(TorchFunctionMode):
    """Adds up the FLOPs of functions as their operators tell them, of others as torch does."""

    of_convolutions = 0
    of_others = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, op = kwargs or {}, OPS.get(func)
        if op is None:
            with FlopCounterMode(display=False) as inner:
                out = func(*args, **kwargs)
            self.of_others += inner.get_total_flops()
            return out
        flops = op.parse(args, kwargs).flops if op.flops else 0
        if op.family == "windowed":
            self.of_convolutions += flops
        else:
            self.of_others += flops
        return func(*args, **kwargs)


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device."""
    doubles: dict[int, Tensor] = {}
    for parameter in model.parameters():
        doubles[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        doubles[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, doubles)
