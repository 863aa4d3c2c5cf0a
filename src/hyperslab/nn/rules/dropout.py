"""Dropout whose masks depend on the seed and the global index, not on the mesh."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.dist_ops.random_bits import NUM_VALUES, random_bits
from hyperslab.errors import ConfigError
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab

_SATURATION = 1.7580993408473766
"""What SELU comes to, far below zero, with the sign changed."""


@register(F.dropout, torch.dropout)
def dropout(
    input: Slab,
    p: float = 0.5,
    train: bool = True,
    inplace: bool = False,
    *,
    training: bool | None = None,
) -> Slab:
    """``input`` with each element zeroed with probability ``p``, the others scaled up for it."""
    return _drop(input, p, input.ndim, train if training is None else training, inplace=inplace)


def _make_feature_dropout(num_dims: int) -> None:
    function = getattr(F, f"dropout{num_dims}d")

    @register(function)
    def feature_dropout(
        input: Slab, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Slab:
        """``input`` with each channel of each sample zeroed as a whole."""
        if input.ndim != num_dims + 2:
            why = f"it has {input.ndim} dims, and batched input has {num_dims + 2}"
            raise unsupported(function, input, why)
        return _drop(input, p, 2, training, inplace=inplace)


@register(F.alpha_dropout, torch.alpha_dropout)
def alpha_dropout(
    input: Slab,
    p: float = 0.5,
    train: bool = False,
    inplace: bool = False,
    *,
    training: bool | None = None,
) -> Slab:
    """``input`` with elements set to what SELU saturates at, scaled to the same mean and spread."""
    given = train if training is None else training
    return _drop_alpha(input, p, input.ndim, given, inplace=inplace)


@register(F.feature_alpha_dropout, torch.feature_alpha_dropout)
def feature_alpha_dropout(
    input: Slab,
    p: float = 0.5,
    train: bool = False,
    inplace: bool = False,
    *,
    training: bool | None = None,
) -> Slab:
    """``alpha_dropout`` of whole channels."""
    return _drop_alpha(input, p, 2, train if training is None else training, inplace=inplace)


@register(torch.feature_dropout)
def channel_dropout(input: Slab, p: float, train: bool) -> Slab:
    """``input`` with each channel of each sample zeroed as a whole, for any number of dims."""
    return _drop(input, p, 2, train, inplace=False)


def _drop_alpha(x: Slab, p: float, num_dims: int, training: bool, *, inplace: bool) -> Slab:
    if not 0 <= p <= 1:
        raise ConfigError(f"dropout probability must be between 0 and 1, got {p}")
    if not training or p in (0, 1):
        return _drop(x, p, num_dims, training, inplace=inplace)
    keep = _keep_mask(x, num_dims, p)
    scale = ((_SATURATION**2 * p + 1) * (1 - p)) ** -0.5
    shift = _SATURATION * scale * p
    lost = x.local.new_full((), shift - _SATURATION * scale)
    dropped = torch.where(keep, x.local * scale + shift, lost)
    return x.copy_(x.with_local(dropped)) if inplace else x.with_local(dropped)


def _drop(x: Slab, p: float, num_dims: int, training: bool, *, inplace: bool) -> Slab:
    if not 0 <= p <= 1:
        raise ConfigError(f"dropout probability must be between 0 and 1, got {p}")
    if not training or p == 0:
        return x
    if p == 1:
        zero = x.local.new_zeros(())
        return x.mul_(zero) if inplace else x.with_local(x.local * zero)
    if not x.is_floating_point():
        raise ConfigError(f"dropout scales what it keeps, which a {x.dtype} tensor cannot hold")
    keep = _keep_mask(x, num_dims, p)
    scale = 1 / (1 - p)
    if inplace:
        x.local.mul_(keep * x.local.new_full((), scale))
        return x
    return x.with_local(x.local * scale * keep)


def _keep_mask(x: Slab, num_dims: int, p: float) -> Tensor:
    """True where the element stays, the same along the dims after the first ``num_dims``."""
    return random_bits(x.layout, x.mesh, x.local.device, num_dims) >= round(p * NUM_VALUES)


for _num_dims in (1, 2, 3):
    _make_feature_dropout(_num_dims)
