"""Layers of torch that run outside of the mode of a single rank, where it cannot serve them.

The mode costs the host a microsecond or more for every function and every attribute of a tensor.
What torch's own layers call is known, so that one look at a layer's input tells whether any of it
is served. Convolutions, batch norms and dense layers then call their function by themselves, which
takes less time than the ``forward`` that would look up each of their attributes. This changes times
and nothing else: all other layers run in the mode, as torch runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.comm.mesh import with_first_mesh
from hyperslab.kernels import act_pool, tiles
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.layout import per_dim
from hyperslab.nn.dispatch import waiting
from hyperslab.nn.op import IMPLEMENTED, USERS
from hyperslab.nn.ops.each.random import drop_small
from hyperslab.nn.single_rank.mode import SingleRankMode
from hyperslab.nn.single_rank.served import (
    conv_needs,
    conv_transpose_needs,
    is_large,
    is_large_or_fused,
    is_too_large,
    may_wait,
    pays,
)
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import (
    has_global_module_hooks,
    is_cudnn_enabled,
    jit_tracing_state,
    num_function_modes,
    patch_call,
    patch_handler,
    pop_function_mode,
    push_function_mode,
)

Run = Callable[[Any, Tensor], Any]


class Known(NamedTuple):
    """What is known of the layers of a class."""

    run: Run
    """What the layer computes of this input, outside of the mode.

    ``NotImplemented`` where the mode may serve it.
    """
    serve: Callable[[SingleRankMode, Any, Tensor], Any] | None = None
    """What the mode makes of it where it may serve it; ``NotImplemented`` where that is not known.

    Without it, and then, the layer runs in the mode.
    """


def _unless(needs: Callable[..., bool]) -> Callable[[type[nn.Module]], Known]:
    """Of layers that run as they are, unless by what they are given the mode may serve them."""

    def known(cls: type[nn.Module]) -> Known:
        forward: Run = cls.forward

        def run(layer: nn.Module, x: Tensor) -> Any:
            return NotImplemented if needs(x, layer) else forward(layer, x)

        return Known(run)

    return known


def _activated(x: Tensor, layer: nn.ReLU) -> bool:
    return may_wait(x, inplace=layer.inplace)


def _transposed(x: Tensor, layer: nn.ConvTranspose3d) -> bool:
    weight = layer._parameters.get("weight")
    return weight is None or conv_transpose_needs(x, weight)


def _dropped(x: Tensor, layer: nn.Dropout) -> bool:
    return layer.training


def _run_dropout(layer: nn.Dropout, x: Tensor) -> Any:
    return NotImplemented if layer.__dict__["training"] else nn.Dropout.forward(layer, x)


def _serve_dropout(mode: SingleRankMode, layer: nn.Module, x: Tensor) -> Any:
    own = layer.__dict__
    if own["inplace"] or F.dropout is not _dropout or not mode.serves():  # or changed by others
        return NotImplemented
    return drop_small(x, own["p"])


_dropout = F.dropout


def _pool(mode: Literal["avg", "max"]) -> Callable[[type[nn.Module]], Known]:
    def known(cls: type[nn.Module]) -> Known:
        num_dims, run = int(cls.__name__[-2]), _unless(is_large_or_fused)(cls).run

        def serve(single_rank: SingleRankMode, layer: nn.Module, x: Tensor) -> Any:
            """By a fused kernel, as the pool's rule does it, without a Slab."""
            own = layer.__dict__
            if own["ceil_mode"] or own.get("return_indices") or own.get("dilation", 1) != 1:
                return NotImplemented
            if own.get("divisor_override") is not None or not single_rank.serves():
                return NotImplemented
            pool = Pool(
                mode,
                per_dim(own["kernel_size"], num_dims),
                per_dim(own["stride"], num_dims),
                per_dim(own["padding"], num_dims),
                own.get("count_include_pad", True),
            )
            if not pays(x) or not act_pool.is_supported(x, 1.0, pool):
                return NotImplemented
            return act_pool.activate_and_pool(x, 1.0, pool)

        return Known(run, serve if num_dims > 1 else None)

    return known


def _as_is(cls: type[nn.Module]) -> Known:
    return Known(cls.forward)


def _convolution(cls: Any) -> Known:
    name = cls.__name__.lower()
    inner = cls._conv_forward

    def run(layer: nn.Module, x: Tensor) -> Any:
        """Nor where others have changed what it calls, or hold its weights elsewhere."""
        own = layer.__dict__
        weights = own["_parameters"]
        weight = weights.get("weight")
        if weight is None or "bias" not in weights or own["padding_mode"] != "zeros":
            return NotImplemented
        if cls._conv_forward is not inner or "_conv_forward" in own:
            return NotImplemented
        stride, padding, dilation = own["stride"], own["padding"], own["dilation"]
        if conv_needs(x, weight, stride, padding, dilation):
            return NotImplemented
        bias, groups = weights["bias"], own["groups"]
        return getattr(F, name)(x, weight, bias, stride, padding, dilation, groups)

    return Known(run)


def _batch_norm(*input_dims: int) -> Known:
    def run(layer: nn.Module, x: Tensor) -> Any:
        """As its ``forward`` does it where it tracks statistics with a momentum, as most do."""
        numel = x.numel()
        if numel > tiles.MAX_NUMEL:
            return NotImplemented
        own = layer.__dict__
        weights, statistics, momentum = own["_parameters"], own["_buffers"], own["momentum"]
        mean, variance = statistics.get("running_mean"), statistics.get("running_var")
        count, training, eps = statistics.get("num_batches_tracked"), own["training"], own["eps"]
        is_usual = (
            own["track_running_stats"]
            and momentum is not None
            and mean is not None
            and variance is not None
            and count is not None
            and "weight" in weights
            and "bias" in weights
            and x.dim() in input_dims
            and numel > x.size(1)  # else it has no variance
            and eps > 0
            and F.batch_norm is _batch_norm_function
        )
        if not is_usual:
            return layer.forward(x)
        if training:
            count.add_(1)
        factors = weights["weight"], weights["bias"]
        uses_cudnn = is_cudnn_enabled()
        return torch.batch_norm(
            x, *factors, mean, variance, bool(training), momentum, eps, uses_cudnn
        )

    return Known(run)


_batch_norm_function = F.batch_norm


def _run_linear(layer: nn.Module, x: Tensor) -> Any:
    weights = layer.__dict__["_parameters"]
    if "weight" not in weights or "bias" not in weights:
        return layer.forward(x)
    return F.linear(x, weights["weight"], weights["bias"])


def _classes(*names: str) -> list[type[nn.Module]]:
    return [getattr(nn, name.format(n)) for name in names for n in (1, 2, 3)]


def _each(
    classes: Iterable[type[nn.Module]], known: Callable[[type[nn.Module]], Known]
) -> dict[type[nn.Module], Known]:
    return {cls: known(cls) for cls in classes}


LAYERS: dict[type[nn.Module], Known] = {
    **_each(_classes("Conv{}d"), _convolution),
    nn.BatchNorm1d: _batch_norm(2, 3),
    nn.BatchNorm2d: _batch_norm(4),
    nn.BatchNorm3d: _batch_norm(5),
    nn.Linear: Known(_run_linear),
    **_each(_classes("ConvTranspose{}d"), _unless(_transposed)),
    **_each((*_classes("InstanceNorm{}d"), nn.GroupNorm, nn.LayerNorm), _unless(is_too_large)),
    **_each(_classes("MaxPool{}d"), _pool("max")),
    **_each(_classes("AvgPool{}d"), _pool("avg")),
    **_each(_classes("AdaptiveAvgPool{}d", "AdaptiveMaxPool{}d"), _unless(is_large)),
    **_each((nn.ReLU, nn.LeakyReLU), _unless(_activated)),
    nn.Dropout: Known(_run_dropout, _serve_dropout),
    **_each((*_classes("Dropout{}d"), nn.AlphaDropout), _unless(_dropped)),
    **_each((nn.Flatten, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh), _as_is),
}
"""The layers that are known."""


def make_call(cls: type[nn.Module], known: Known) -> Callable[..., Any]:
    """What calls layers of ``cls``: as torch does, but outside of the mode where that can be.

    In the mode run those that are of a subclass or have hooks or a ``forward`` of their own, which
    may call anything, and those before which something waits for the next function.
    """
    forward, (run, serve) = cls.forward, known

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
                    and not own["_forward_pre_hooks"]
                    and not own["_forward_hooks"]
                    and not own["_backward_pre_hooks"]
                    and not own["_backward_hooks"]
                    and not has_global_module_hooks()
                    and jit_tracing_state() is None
                    and not waiting.calls
                    and not (USERS or IMPLEMENTED)
                ):
                    out = run(self, x)
                    if out is NotImplemented and serve is not None:
                        out = serve(mode, self, x)
                    if out is not NotImplemented:
                        return out
        finally:
            push_function_mode(mode)
        return self._call_impl(*args, **kwargs)

    return call


@with_first_mesh
def patch_layers() -> None:
    patch_handler(SingleRankMode, Slab)
    for cls, known in LAYERS.items():
        patch_call(cls, make_call(cls, known))
