"""The signature of a forward pass: all that it depends on besides values and its module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hyperslab.nn.module_snapshot import PLAIN
from hyperslab.nn.op import num_registered
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import num_function_modes, tree_flatten


def call_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[object, ...] | None:
    """A hashable value that is equal for passes which do the same but for values.

    It has shapes, strides, dtypes and layouts of tensors, numbers and strings themselves, the
    modes of autocast and autograd, torch's settings, and how many rules users have registered.
    None where an argument is neither a dense tensor on ``device`` nor a plain value, as a pass may
    depend on more of it, and where there is no tensor.
    """
    leaves, spec = [*args], None
    if kwargs or len(args) != 1 or type(args[0]) is not Slab:  # most have one Slab
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_slab)
    signatures = tuple([_signature_of(leaf, device) for leaf in leaves])
    if None in signatures or all(type(leaf) in PLAIN for leaf in leaves):
        return None
    name = device.type
    autocast = torch.is_autocast_enabled(name) and torch.get_autocast_dtype(name)
    grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return signatures, spec, autocast, grads, _settings(), num_registered()


def _signature_of(leaf: Any, device: torch.device) -> object:
    if type(leaf) in PLAIN:
        return type(leaf), leaf
    layout, tensor = (leaf.layout, leaf.local) if isinstance(leaf, Slab) else (None, leaf)
    if type(tensor) not in (Tensor, Parameter) or tensor.device != device:
        return None
    if tensor.layout != torch.strided:
        return None
    return layout, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _settings() -> tuple[object, ...]:
    backends: Any = torch.backends
    return (
        backends.cudnn.conv.fp32_precision,
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        num_function_modes(),  # that of a default device among them
    )
