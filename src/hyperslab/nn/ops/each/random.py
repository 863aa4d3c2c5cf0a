"""Dropout and noise: the same on any mesh, by the seed and each element's global index."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from hyperslab.dist_ops import random_bits as bits
from hyperslab.dist_ops.random_bits import (
    NUM_VALUES,
    Drawn,
    bits_of,
    draw_or_ask,
    draws_now,
    is_small,
    kept_bits_reach,
    kept_signed_hashes,
    random_bits_reach,
)
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES, Grid, Layout, Span
from hyperslab.nn.op import Function, define, unsupported
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import untraced

_SATURATION = 1.7580993408473766
"""What SELU comes to, far below zero, with the sign changed."""


def _make_dropout(
    drop: Callable[..., Slab],
    *functions: Function,
    num_dims: int | None = None,
    batch_dims: int | None = None,
    training: bool,
) -> None:
    """A dropout by ``drop``: elements along the first ``num_dims`` dims stay or go, or along all.

    ``batch_dims`` are those that its input must have; ``training`` is the default.
    """
    trains = training

    @define("random", *functions)
    def dropout(
        input: Slab, p: float = 0.5, training: bool = trains, inplace: bool = False
    ) -> Slab:
        if batch_dims not in (None, input.ndim):
            why = f"it has {input.ndim} dims, and batched input has {batch_dims}"
            raise unsupported(functions[0], input, why)
        if not 0 <= p <= 1:
            raise ConfigError(f"dropout probability must be between 0 and 1, got {p}")
        if not training or p == 0:
            return input
        if p == 1:
            zero = input.local.new_zeros(())
            return input.mul_(zero) if inplace else input.with_local(input.local * zero)
        return drop(input, p, num_dims or input.ndim, inplace=inplace)


def _drop_alpha(x: Slab, p: float, num_dims: int, *, inplace: bool) -> Slab:
    """``x`` with elements set to what SELU saturates at, scaled to the same mean and spread."""
    keep = _keep_mask(x, num_dims, p)
    scale = ((_SATURATION**2 * p + 1) * (1 - p)) ** -0.5
    shift = _SATURATION * scale * p
    lost = x.local.new_full((), shift - _SATURATION * scale)
    dropped = torch.where(keep, x.local * scale + shift, lost)
    return x.copy_(x.with_local(dropped)) if inplace else x.with_local(dropped)


def _drop(x: Slab, p: float, num_dims: int, *, inplace: bool) -> Slab:
    """``x`` with each element zeroed with probability ``p``, the others scaled up for it."""
    if not x.is_floating_point() and not x.is_complex():
        raise ConfigError(f"dropout scales what it keeps, which a {x.dtype} tensor cannot hold")
    keep = _keep_mask(x, num_dims, p)
    scale = 1 / (1 - p)
    if inplace:
        x.local.mul_(keep * x.local.new_full((), scale))
        return x
    if is_small(x.layout) and draws_now() and (of := _kept_or_lost(scale, x.dtype, x.device)):
        return x.with_local(x.local * torch.where(keep, *of))
    return x.with_local(x.local * scale * keep)


def _keep_mask(x: Slab, num_dims: int, p: float) -> Tensor:
    """True where the element stays, the same along the dims after the first ``num_dims``."""
    least = round(p * NUM_VALUES)
    return random_bits_reach(least, x.layout, x.mesh, x.local.device, num_dims)


def drop_small(x: Tensor, p: float) -> Any:
    """What ``F.dropout`` makes of a small tensor that is whole on this rank, in the least time.

    The same as on Slabs; ``NotImplemented`` where more must be looked at.
    """
    if not 0 < p < 1 or x.numel() > bits.KEPT_NUMEL or not draws_now():
        return NotImplemented
    kept = _kept_for(p, x.shape, x.dtype, x.device)
    if kept is None:
        return NotImplemented
    least, hashes, scale, zero = kept
    return x * torch.where(kept_bits_reach(least, hashes), scale, zero)


@lru_cache(maxsize=32)
def _kept_for(
    p: float, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[int, Tensor, Tensor, Tensor] | None:
    """The least bits of elements that stay, hashes of indices, and what elements are multiplied by.

    None where elements are multiplied in another way.
    """
    of = _kept_or_lost(1 / (1 - p), dtype, device) if dtype.is_floating_point else None
    least = round(p * NUM_VALUES)
    if of is None or least == NUM_VALUES:
        return None
    return least, kept_signed_hashes(Layout.unsplit(shape), _ONE_RANK, 0, len(shape), device), *of


_ONE_RANK = Grid((1,) * len(AXES))


@lru_cache(maxsize=64)
@untraced()
def _kept_or_lost(
    scale: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """By what an element is multiplied that stays, and one that does not.

    Small tensors are multiplied once, forward and backward. None where ``dtype`` would round the
    scale, as no multiplication by a number does.
    """
    is_wide = dtype in (torch.float32, torch.float64)
    if not is_wide and torch.tensor(scale, dtype=dtype).item() != scale:
        return None
    kept, lost = (torch.full((), each, dtype=dtype, device=device) for each in (scale, 0.0))
    return kept, lost


_make_dropout(_drop, F.dropout, torch.dropout, training=True)
_make_dropout(_drop, torch.feature_dropout, num_dims=2, training=True)
for _num_dims in (1, 2, 3):  # a channel of a sample goes as a whole
    _function = getattr(F, f"dropout{_num_dims}d")
    _make_dropout(_drop, _function, num_dims=2, batch_dims=_num_dims + 2, training=True)
_make_dropout(_drop_alpha, F.alpha_dropout, torch.alpha_dropout, training=False)
_FEATURES = F.feature_alpha_dropout, torch.feature_alpha_dropout
_make_dropout(_drop_alpha, *_FEATURES, num_dims=2, training=False)


def _uniform(x: Slab) -> Tensor:
    """Numbers from 0 to below 1 for this rank's elements of ``x``, in float64."""
    return _uniform_of((draw_or_ask(), draw_or_ask()), x)


def _uniform_of(drawn: tuple[Drawn, Drawn], x: Slab, rows: Span | None = None) -> Tensor:
    place = x.layout, x.mesh, x.local.device, x.ndim, rows
    shape = x.box.shape if rows is None else (rows.size, *x.box.shape[1:])
    high, low = (bits_of(each, *place).expand(shape) for each in drawn)
    numbers: Tensor = (high * (1 << 21) + (low >> 11)).double() / (NUM_VALUES << 21)
    return numbers


FILLED_NUMEL = 1 << 22
"""How many elements are filled at once: their bits take many times their memory."""


def _fill(x: Slab, num: int, make: Callable[..., Tensor]) -> Slab:
    """``x``, filled with what ``make`` makes of ``num`` uniform numbers for each element."""
    drawn = [(draw_or_ask(), draw_or_ask()) for _ in range(num)]
    if x.local.numel() <= FILLED_NUMEL:
        x.local.copy_(make(*[_uniform_of(each, x) for each in drawn]))
        return x
    start, stop = x.box.spans[0]
    step = max(1, FILLED_NUMEL * x.local.shape[0] // x.local.numel())
    for first in range(start, stop, step):
        rows = Span(first, min(first + step, stop))
        numbers = [_uniform_of(each, x, rows) for each in drawn]
        x.local[rows.slice_from(start)].copy_(make(*numbers))
    return x


def _as_dtype(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """``numbers`` below 1 in ``dtype``, in which none may be rounded up to 1."""
    steps = 2 / torch.finfo(dtype).eps
    return ((numbers * steps).floor() / steps).to(dtype)


def _normal(first: Tensor, second: Tensor) -> Tensor:
    """Numbers of the standard normal distribution, of uniform ones."""
    return torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)


def _like(x: Slab, local: Tensor, dtype: torch.dtype | None, options: dict[str, Any]) -> Slab:
    """A Slab of ``local``; torch's own function takes ``options`` that none here knows."""
    wants_grad = bool(options.pop("requires_grad", False))
    made = torch.empty_like(local, dtype=dtype or x.dtype, **options).copy_(local)
    return x.with_local(made.requires_grad_(wants_grad))


def _check(function: Any, x: Slab, generator: Generator | None, out_dtype: torch.dtype) -> None:
    """Raises for what only torch's own generators can give."""
    if generator is not None:
        raise unsupported(function, x, "a generator of its own draws other numbers on every rank")
    if not out_dtype.is_floating_point:
        raise unsupported(function, x, "its numbers are not floating point")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


@define("random", torch.rand_like)
def rand_like(
    input: Slab,
    *,
    dtype: torch.dtype | None = None,
    generator: Generator | None = None,
    **options: Any,
) -> Slab:
    """Numbers from 0 to below 1, in the shape of ``input``."""
    out_dtype = dtype or input.dtype
    _check(torch.rand_like, input, generator, out_dtype)
    return _like(input, _as_dtype(_uniform(input), out_dtype), out_dtype, options)


@define("random", torch.randn_like)
def randn_like(
    input: Slab,
    *,
    dtype: torch.dtype | None = None,
    generator: Generator | None = None,
    **options: Any,
) -> Slab:
    """Numbers of the standard normal distribution, in the shape of ``input``."""
    _check(torch.randn_like, input, generator, dtype or input.dtype)
    return _like(input, _normal(_uniform(input), _uniform(input)), dtype, options)


@define("random", torch.bernoulli)
def bernoulli(input: Slab, p: float | None = None, *, generator: Generator | None = None) -> Slab:
    """Ones with the probability that each element of ``input``, or ``p``, says; else zeros."""
    _check(torch.bernoulli, input, generator, input.dtype)
    _require(p is None or 0 <= p <= 1, f"bernoulli wants a probability, got {p}")
    chance = input.local.detach() if p is None else p
    no_grad = input.local.nan_to_num() * 0  # torch's gradient of it is zero, not none
    return input.with_local(no_grad + (_uniform(input) < chance).to(input.dtype))


@define("random", Tensor.normal_)
def normal_(
    self: Slab, mean: float = 0, std: float = 1, *, generator: Generator | None = None
) -> Slab:
    """``self``, filled with numbers of a normal distribution."""
    _check(Tensor.normal_, self, generator, self.dtype)
    _require(std >= 0, f"normal_ wants a spread of at least 0, got {std}")
    return _fill(self, 2, lambda *uniform: _normal(*uniform) * std + mean)


@define("random", Tensor.uniform_)
def uniform_(self: Slab, to: float = 0, end: float = 1, **options: Any) -> Slab:
    """``self``, filled with numbers from the first to below the second bound."""
    low, high = options.pop("from", to), options.pop("to", end)
    _check(Tensor.uniform_, self, options.pop("generator", None), self.dtype)
    _require(low <= high, f"uniform_ wants bounds that rise, got {low} and {high}")
    return _fill(self, 1, lambda x: _as_dtype(x, self.dtype) * (high - low) + low)


@define("random", Tensor.bernoulli_)
def bernoulli_(self: Slab, p: float = 0.5, *, generator: Generator | None = None) -> Slab:
    """``self``, filled with ones with probability ``p`` and else zeros."""
    if isinstance(p, Tensor | Slab):
        raise unsupported(
            Tensor.bernoulli_, self, "its probability is a tensor: use torch.bernoulli"
        )
    _check(Tensor.bernoulli_, self, generator, self.dtype)
    _require(0 <= p <= 1, f"bernoulli_ wants a probability, got {p}")
    return _fill(self, 1, lambda x: x < p)


@define("random", Tensor.exponential_)
def exponential_(self: Slab, lambd: float = 1, *, generator: Generator | None = None) -> Slab:
    """``self``, filled with numbers of an exponential distribution."""
    _check(Tensor.exponential_, self, generator, self.dtype)
    _require(lambd > 0, f"exponential_ wants a rate above 0, got {lambd}")
    return _fill(self, 1, lambda x: -torch.log1p(-x) / lambd)


@define("random", F.gumbel_softmax)
def gumbel_softmax(
    logits: Slab, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """A sample of classes by their ``logits``, soft, or hard with the gradient of the soft one."""
    x: Any = logits
    noise: Any = torch.empty_like(x)
    soft = ((x - noise.exponential_().log()) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = (soft == soft.amax(dim, keepdim=True)).to(soft.dtype)
    return chosen - soft.detach() + soft
