"""What convolutions and pools have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hyperslab.errors import ConfigError, LayoutError
from hyperslab.layout import Layout
from hyperslab.nn.registry import integers, unsupported
from hyperslab.nn.slab import Slab


def per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """One value a dim, as torch reads an argument that may be a number, or a list of one or all."""
    values = integers(value)
    if len(values) not in (1, num_dims):
        raise LayoutError(f"{values} should be one number, or one for each of {num_dims} dims")
    return values * num_dims if len(values) == 1 else values


def check_steps(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int] = (1,)
) -> None:
    """Raises where torch would refuse these numbers."""
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise LayoutError(
            "stride and dilation must be at least 1 and padding at least 0, got stride "
            f"{tuple(stride)}, dilation {tuple(dilation)} and padding {tuple(padding)}"
        )


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


def autocast(x: Slab, weight: Tensor, bias: Tensor | None) -> tuple[Slab, Tensor, Tensor | None]:
    """The operands as autocast casts those of a plain convolution, where it is on.

    Cast before the exchange, halos travel in the short dtype too.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return x.with_local(cast(x.local)), cast(weight), None if bias is None else cast(bias)


def check_spatial(function: Callable[..., Any], x: Slab, num_dims: int) -> Slab:
    """``x``, if it has a sample dim and a whole channel dim before its spatial dims."""
    if x.ndim != num_dims + 2:
        raise unsupported(
            function, x, f"it has {x.ndim} dims, and batched input has {num_dims + 2}"
        )
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
