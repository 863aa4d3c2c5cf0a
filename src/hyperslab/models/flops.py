"""What a network costs, counted on tensors that take no memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten._convolution)


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
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = double(sample)
    counts = counter.get_flop_counts().get("Global", {})
    conv = sum(counts.get(function, 0) for function in CONVOLUTIONS)
    return Description(
        num_parameters=sum(p.numel() for p in model.parameters()),
        conv_flops=conv,
        forward_flops=counter.get_total_flops(),
        output_shape=tuple(output.shape[1:]),
    )


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device."""
    doubles: dict[int, Tensor] = {}
    for parameter in model.parameters():
        doubles[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        doubles[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, doubles)
