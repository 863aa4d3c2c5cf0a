"""Functions of torch that do not ask their arguments for a rule: here they do.

Torch takes a Slab for no tensor in them, and so would drop a branch of a network or the gradient of
a function without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function
from torch.jit._builtins import _register_builtin
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from hyperslab.errors import UnsupportedOp
from hyperslab.nn.op import define
from hyperslab.nn.slab import Slab, is_slab


def _judge_pieces(judge: Callable[..., bool]) -> Callable[..., bool]:
    """``judge`` with a Slab, or Slabs in a container, taken for the tensors that they stand for."""

    @wraps(judge)
    def judge_pieces(obj: Any, *args: Any, **kwargs: Any) -> bool:
        if isinstance(obj, Slab | list | tuple | dict):
            obj = tree_map(_piece, obj, is_leaf=is_slab)
        return judge(obj, *args, **kwargs)

    return judge_pieces


def _piece(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Slab) else leaf


_HARMLESS = {"_NoopSaveInputs"}
"""Functions of torch that give back what they get: that of activation checkpointing."""


def _apply_by_rule(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of a Function's class, or the rule registered for it if there is a Slab."""

    @wraps(apply)
    def apply_by_rule(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        slab = next((arg for arg in args if isinstance(arg, Slab)), None)
        if slab is not None and cls.__name__ not in _HARMLESS:
            return slab._run(cls.apply, args, kwargs)
        return apply(cls, *args, **kwargs)

    return apply_by_rule


torch.jit.isinstance = _judge_pieces(torch.jit.isinstance)
Function.apply = classmethod(_apply_by_rule(Function.apply.__func__))  # type: ignore[assignment,attr-defined]


_plain_as_tensor = torch.as_tensor


@wraps(_plain_as_tensor)
def as_tensor(data: Any, **kwargs: Any) -> Any:
    """The tensor of ``data``: a Slab is one already."""
    if isinstance(data, Slab):
        return data._run(as_tensor, (data,), kwargs)
    return _plain_as_tensor(data, **kwargs)


@define("shape", as_tensor)
def _slab_as_tensor(
    data: Slab, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Any:
    return data.to(device or data.device, dtype or data.dtype)


torch.as_tensor = as_tensor  # type: ignore[assignment]
_register_builtin(as_tensor, "aten::as_tensor")  # as TorchScript knows it


@define("shape", CheckpointFunction.apply)  # as it is from here on
def reentrant_checkpoint(*args: Any) -> Any:
    """Refused: it gives gradients to the tensors among its arguments, and a Slab is none."""
    raise UnsupportedOp(
        "a reentrant checkpoint cannot run on split tensors: call "
        "torch.utils.checkpoint.checkpoint with use_reentrant=False"
    )
