"""Dropout whose masks depend on the seed and the global index, not on the mesh."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.graph import is_watched
from hyperslab.comm.journal import journal
from hyperslab.errors import ConfigError
from hyperslab.layout import Box
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab

_FACTORS = 0x21F0AAAD, 0x735A2D97  # of the hash lowbias32; below 2**31: no int64 product overflows
_WORD = 0xFFFFFFFF


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
    keep = _keep_mask(x.box, num_dims, p, x.device)
    scale = 1 / (1 - p)
    if inplace:
        x.local.mul_(keep * torch.tensor(scale, dtype=x.dtype, device=x.device))
        return x
    return x.with_local(torch.where(keep, x.local * scale, x.local.new_zeros(())))


def _keep_mask(box: Box, num_dims: int, p: float, device: torch.device) -> Tensor:
    """True where the element stays; a hash of the global index along the first ``num_dims`` dims.

    The seed comes from torch's CPU generator: all ranks draw the same one, and activation
    checkpointing, which restores that generator, draws the same mask again.
    """
    bits = torch.randint(_WORD + 1, ())  # a tensor, as a compiled graph draws one in every step
    if not is_watched():
        journal.add(torch.randint, (int(bits),))  # ranks compare what they drew
    for dim, span in enumerate(box.spans[:num_dims]):
        index = torch.arange(span.start, span.stop, dtype=torch.int64, device=device)
        bits = _mixed(bits ^ index.view(-1, *[1] * (len(box.spans) - 1 - dim)))
    return bits >= round(p * (_WORD + 1))


def _mixed(bits: Tensor) -> Tensor:
    """Every bit of the 32-bit words in ``bits`` spread over all of them."""
    bits = (bits + 0x9E3779B9) & _WORD
    bits = ((bits ^ bits >> 16) * _FACTORS[0]) & _WORD
    bits = ((bits ^ bits >> 15) * _FACTORS[1]) & _WORD
    return bits ^ bits >> 15


for _num_dims in (1, 2, 3):
    _make_feature_dropout(_num_dims)
