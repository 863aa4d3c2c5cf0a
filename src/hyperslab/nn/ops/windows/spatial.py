"""What convolutions, pools and other functions of spatial dims have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.errors import ConfigError, LayoutError
from hyperslab.layout import Layout, Split
from hyperslab.nn.op import OPS, Call, Function, Rule, define, unsupported
from hyperslab.nn.slab import Slab


def check_weights(
    function: Callable[..., Any],
    x: Slab,
    weight: Tensor,
    bias: Tensor | None,
    channels: tuple[int, int],
    groups: int,
) -> None:
    """Raises where torch would refuse the weights; ``channels`` are those they take and give.

    Before any message, and also on ranks that own no output and never run the local operator.
    """
    wants, gives = channels
    unlike = bias is not None and tuple(bias.shape) != (gives,)
    if weight.ndim != x.ndim or wants != x.shape[1] or weight.shape[0] % groups or unlike:
        raise LayoutError(
            f"{function.__name__}: a weight of shape {tuple(weight.shape)}, a bias of shape "
            f"{None if bias is None else tuple(bias.shape)} and groups={groups} do not fit an "
            f"input of shape {tuple(x.shape)}"
        )
    dtypes = [t.dtype for t in (x, weight, bias) if t is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise ConfigError(
            f"{function.__name__}: input, weight and bias must have one dtype, got "
            f"{', '.join(map(str, dtypes))}"
        )


def autocast(x: Slab, weight: Any, bias: Any) -> tuple[Slab, Any, Any]:
    """The operands as autocast casts those of a plain convolution, where it is on.

    Cast before the exchange, halos travel in the short dtype too.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    weight = weight.to(autocast_dtype(weight))
    bias = None if bias is None else bias.to(autocast_dtype(bias))
    return x.with_local(x.local.to(autocast_dtype(x.local))), weight, bias


def autocast_dtype(operand: Slab | Tensor) -> torch.dtype:
    """The dtype in which a convolution computes with ``operand``."""
    device_type = operand.device.type
    casts = operand.is_floating_point() and operand.dtype != torch.float64
    is_on = casts and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else operand.dtype


def define_windowed(
    num_dims: int,
    *functions: Function,
    reader: Callable[..., Call],
    run: Callable[[Call], Any],
    flops: Callable[[Call], int] | None = None,
) -> None:
    """Has ``run`` compute the Calls that ``reader`` makes of the arguments of ``functions``.

    ``run`` gets batches: (samples, channels, spatial dims).
    """

    def run_batch(call: Call) -> Any:
        x = call.input
        if not isinstance(x, Slab) or x.ndim != num_dims + 1:
            return run(call)
        return _its_samples(run(call.on(one_sample(x), *call.operands[1:])))

    for function in functions:
        _define(function, reader, run_batch, flops)


def _define(
    function: Function,
    reader: Callable[..., Call],
    run: Callable[[Call], Any],
    flops: Callable[[Call], int] | None,
) -> None:
    @define("windowed", function, reader=reader, flops=flops)
    def rule(*args: Any, **kwargs: Any) -> Any:
        op = OPS[function]
        call = reader(op, *args, **kwargs)
        out = op.run_fused(call) if op.fused else None
        return run(call) if out is None else out


def by_implementation(call: Call, *operands: Any, **options: Any) -> Any:
    """What the first implementation that fits makes of pieces; None where none does."""
    if not call.op.implementations:
        return None
    part = call.on(*operands, **options)
    found = part.implementation()
    return None if found is None else found.run(part, part.input)


def without_samples(num_dims: int) -> Callable[[Rule], Rule]:
    """Makes a rule for (samples, channels, spatial dims) one for (channels, spatial dims) too."""

    def wrap(rule: Rule) -> Rule:
        @wraps(rule)
        def either(x: Slab | Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, Slab) or x.ndim != num_dims + 1:
                return rule(x, *args, **kwargs)
            return _its_samples(rule(one_sample(x), *args, **kwargs))

        return either  # type: ignore[return-value]

    return wrap


def one_sample(x: Slab) -> Slab:
    """``x`` as the only sample of a batch."""
    layout = Layout((1, *x.layout.shape), (None, *x.layout.splits))
    return x.with_local(x.local.unsqueeze(0), layout)


def _its_samples(out: Slab | tuple[Slab, ...]) -> Slab | tuple[Slab, ...]:
    """The only sample of a batch, or of each of several."""
    if isinstance(out, tuple):
        return tuple(map(_its_sample, out))
    return _its_sample(out)


def _its_sample(x: Slab) -> Slab:
    return x.with_local(x.local.squeeze(0), Layout(x.layout.shape[1:], x.layout.splits[1:]))


def check_batch(function: Callable[..., Any], x: Slab, num_dims: int) -> Slab:
    """``x``, if it has a sample and a channel dim before its spatial dims."""
    if x.ndim != num_dims + 2:
        raise unsupported(
            function,
            x,
            f"it has {x.ndim} dims, and batched input has {num_dims + 2}, a sample {num_dims + 1}",
        )
    return x


def check_spatial(function: Callable[..., Any], x: Slab, num_dims: int) -> Slab:
    """``x``, if it has a sample dim and a whole channel dim before its spatial dims."""
    check_batch(function, x, num_dims)
    if x.layout.splits[1]:
        raise unsupported(function, x, "its channels are split")
    return x


def check_extents(function: Callable[..., Any], x: Slab, layout: Layout) -> None:
    """Raises, on all ranks alike, where input or output have no elements along a spatial dim."""
    if min(*layout.shape[2:], *x.layout.shape[2:]) < 1:
        raise LayoutError(
            f"{function.__name__}: the kernel does not fit the padded input of shape "
            f"{tuple(x.shape)}; the output would have shape {layout.shape}"
        )


def scaled(split: Split | None, factor: int) -> Split | None:
    """``split`` when every index stands for ``factor`` indices."""
    return split and Split(split.axis, split.cuts.scaled(factor))


def along(values: Tensor, dim: int, ndim: int) -> Tensor:
    """One value for each index of ``dim``, to be broadcast over the other of ``ndim`` dims."""
    return values.view(-1, *(1,) * (ndim - 1 - dim))


def result_dtype(run: Callable[[Tensor], Tensor], x: Slab) -> torch.dtype:
    """The dtype that ``run`` gives a tensor like ``x``: under autocast it may be another."""
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return run(x.local.new_zeros((1,) * x.ndim)).dtype


def no_outputs(shape: tuple[int, ...], x: Tensor, dtype: torch.dtype) -> Tensor:
    """The output of a rank that owns none of it, in the dtype of the other ranks' outputs."""
    return empty_output(shape, x.to(dtype))
