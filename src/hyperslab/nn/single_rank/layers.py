"""Layers of torch that run outside of the mode of a single rank, where it cannot serve them.

The mode costs the host a microsecond or more for every function and every attribute of a tensor.
What torch's own layers call is known, so that one look at a layer's input tells whether any of it
is served. Convolutions, batch norms and dense layers then call their function by themselves, which
takes less time than the ``forward`` that would look up each of their attributes. This changes times
and nothing else: all other layers run in the mode, as torch runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.comm.mesh import with_first_mesh
from hyperslab.nn.dispatch import waiting
from hyperslab.nn.op import IMPLEMENTED, USERS
from hyperslab.nn.single_rank.mode import SingleRankMode
from hyperslab.nn.single_rank.served import (
    conv_needs,
    conv_transpose_needs,
    is_large,
    is_large_or_fused,
    may_wait,
)
from hyperslab.torch_private import (
    has_global_module_hooks,
    jit_tracing_state,
    num_function_modes,
    patch_call,
    patch_handler,
    pop_function_mode,
    push_function_mode,
)


def _as_torch(layer: nn.Module, x: Tensor) -> Any:
    return layer._call_impl(x)


class Known(NamedTuple):
    """What is known of the layers of a class."""

    needs: Callable[[Any, Tensor], bool]
    """Whether the mode may serve the layer with this input."""
    run: Callable[[Any, Tensor], Any] = _as_torch
    """What the layer computes of this input, outside of the mode."""
    serve: Callable[[SingleRankMode, Any, Tensor], Any] | None = None
    """What the mode makes of it where it may serve it; ``NotImplemented`` where that is not known.

    Without it, and then, the layer runs in the mode.
    """


def _large(layer: nn.Module, x: Tensor) -> bool:
    return is_large(x)


def _large_or_fused(layer: nn.Module, x: Tensor) -> bool:
    return is_large_or_fused(x)


def _activated(layer: nn.ReLU, x: Tensor) -> bool:
    return may_wait(x, inplace=layer.inplace)


def _transposed(layer: nn.ConvTranspose3d, x: Tensor) -> bool:
    weight = layer._parameters.get("weight")
    return weight is None or conv_transpose_needs(x, weight)


def _dropped(layer: nn.Dropout, x: Tensor) -> bool:
    return layer.training


def _serve_dropout(mode: SingleRankMode, layer: nn.Module, x: Tensor) -> Any:
    if F.dropout is not _dropout:  # others have changed what it calls
        return NotImplemented
    own = layer.__dict__
    return mode.__torch_function__(_dropout, (), (x, own["p"], own["training"], own["inplace"]))


_dropout = F.dropout


def _never(layer: nn.Module, x: Tensor) -> bool:
    return False


def _convolution(num_dims: int) -> Known:
    cls, name = getattr(nn, f"Conv{num_dims}d"), f"conv{num_dims}d"
    inner = cls._conv_forward

    def needs(layer: nn.Module, x: Tensor) -> bool:
        """Also where others have changed what it calls, or hold its weights elsewhere."""
        own = layer.__dict__
        weights = own["_parameters"]
        if weights.get("weight") is None or "bias" not in weights or own["padding_mode"] != "zeros":
            return True
        if cls._conv_forward is not inner or "_conv_forward" in own:
            return True
        return conv_needs(x, weights["weight"])

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        own = layer.__dict__
        weights = own["_parameters"]
        numbers = own["stride"], own["padding"], own["dilation"], own["groups"]
        out: Tensor = getattr(F, name)(x, weights["weight"], weights["bias"], *numbers)
        return out

    return Known(needs, run)


def _batch_norm(*input_dims: int) -> Known:
    def run(layer: nn.Module, x: Tensor) -> Any:
        """As its ``forward`` does it where it tracks statistics with a momentum, as most do."""
        own = layer.__dict__
        weights, statistics, momentum = own["_parameters"], own["_buffers"], own["momentum"]
        is_usual = (
            own["track_running_stats"]
            and momentum is not None
            and statistics.get("running_mean") is not None
            and statistics.get("running_var") is not None
            and statistics.get("num_batches_tracked") is not None
            and "weight" in weights
            and "bias" in weights
            and x.dim() in input_dims
        )
        if not is_usual:
            return layer._call_impl(x)
        training = bool(own["training"])
        if training:
            statistics["num_batches_tracked"].add_(1)
        mean, variance = statistics["running_mean"], statistics["running_var"]
        factors = weights["weight"], weights["bias"]
        return F.batch_norm(x, mean, variance, *factors, training, momentum, own["eps"])

    return Known(_large, run)


def _run_linear(layer: nn.Module, x: Tensor) -> Any:
    weights = layer.__dict__["_parameters"]
    if "weight" not in weights or "bias" not in weights:
        return layer._call_impl(x)
    return F.linear(x, weights["weight"], weights["bias"])


def _classes(*names: str) -> list[type[nn.Module]]:
    return [getattr(nn, name.format(n)) for name in names for n in (1, 2, 3)]


LAYERS: dict[type[nn.Module], Known] = {
    nn.Conv1d: _convolution(1),
    nn.Conv2d: _convolution(2),
    nn.Conv3d: _convolution(3),
    nn.BatchNorm1d: _batch_norm(2, 3),
    nn.BatchNorm2d: _batch_norm(4),
    nn.BatchNorm3d: _batch_norm(5),
    nn.Linear: Known(_never, _run_linear),
    **dict.fromkeys(_classes("ConvTranspose{}d"), Known(_transposed)),
    **dict.fromkeys((*_classes("InstanceNorm{}d"), nn.GroupNorm, nn.LayerNorm), Known(_large)),
    **dict.fromkeys(_classes("MaxPool{}d", "AvgPool{}d"), Known(_large_or_fused)),
    **dict.fromkeys(_classes("AdaptiveAvgPool{}d", "AdaptiveMaxPool{}d"), Known(_large)),
    **dict.fromkeys((nn.ReLU, nn.LeakyReLU), Known(_activated)),
    nn.Dropout: Known(_dropped, serve=_serve_dropout),
    **dict.fromkeys((*_classes("Dropout{}d"), nn.AlphaDropout), Known(_dropped)),
    **dict.fromkeys((nn.Flatten, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh), Known(_never)),
}
"""The layers that are known."""


def make_call(cls: type[nn.Module], known: Known) -> Callable[..., Any]:
    """What calls layers of ``cls``: as torch does, but outside of the mode where that can be.

    In the mode run those that are of a subclass or have hooks or a ``forward`` of their own, which
    may call anything, and those before which something waits for the next function.
    """
    forward, (needs, run, serve) = cls.forward, known

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not num_function_modes():
            return self._call_impl(*args, **kwargs)
        mode = pop_function_mode()
        try:
            if type(mode) is SingleRankMode and len(args) == 1 and not kwargs:
                (x,), own = args, self.__dict__
                if (
                    type(x) is Tensor
                    and type(self) is cls
                    and cls.forward is forward
                    and "forward" not in own
                    and not _has_hooks(own)
                    and not waiting.calls
                    and not (USERS or IMPLEMENTED)
                ):
                    if not needs(self, x):
                        return run(self, x)
                    out = NotImplemented if serve is None else serve(mode, self, x)
                    if out is not NotImplemented:
                        return out
        finally:
            push_function_mode(mode)
        return self._call_impl(*args, **kwargs)

    return call


def _has_hooks(own: dict[str, Any]) -> bool:
    """Whether a module of these attributes has any, or must be called as torch does to be seen."""
    return bool(
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or has_global_module_hooks()
        or jit_tracing_state() is not None
    )


@with_first_mesh
def patch_layers() -> None:
    patch_handler(SingleRankMode)
    for cls, known in LAYERS.items():
        patch_call(cls, make_call(cls, known))
