"""Noise: the same on any mesh, by the global index of each element."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from hyperslab.dist_ops.random_bits import NUM_VALUES, random_bits
from hyperslab.nn.registry import register, unsupported
from hyperslab.nn.slab import Slab


def _uniform(x: Slab) -> Tensor:
    """Numbers from 0 to below 1 for this rank's elements of ``x``, in float64."""
    place = x.layout, x.mesh, x.local.device, x.ndim
    high, low = (random_bits(*place).expand(x.box.shape) for _ in range(2))
    numbers: Tensor = (high * (1 << 21) + (low >> 11)).double() / (NUM_VALUES << 21)
    return numbers


def _as_dtype(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """``numbers`` below 1 in ``dtype``, in which none may be rounded up to 1."""
    steps = 2 / torch.finfo(dtype).eps
    return ((numbers * steps).floor() / steps).to(dtype)


def _normal(x: Slab) -> Tensor:
    """Numbers of the standard normal distribution, in float64."""
    radius = torch.sqrt(-2 * torch.log1p(-_uniform(x)))
    return radius * torch.cos(2 * math.pi * _uniform(x))


def _like(x: Slab, local: Tensor, dtype: torch.dtype | None, options: dict[str, Any]) -> Slab:
    made = local.to(dtype or x.dtype).requires_grad_(bool(options.pop("requires_grad", False)))
    return x.with_local(made)


def _check(function: Any, x: Slab, generator: Generator | None, kind: torch.dtype) -> None:
    """Raises for what only torch's own generators can give."""
    if generator is not None:
        raise unsupported(function, x, "a generator of its own draws other numbers on every rank")
    if not kind.is_floating_point:
        raise unsupported(function, x, "its numbers are not floating point")


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise RuntimeError(words)


@register(torch.rand_like)
def rand_like(
    input: Slab,
    *,
    dtype: torch.dtype | None = None,
    generator: Generator | None = None,
    **options: Any,
) -> Slab:
    """Numbers from 0 to below 1, in the shape of ``input``."""
    kind = dtype or input.dtype
    _check(torch.rand_like, input, generator, kind)
    return _like(input, _as_dtype(_uniform(input), kind), kind, options)


@register(torch.randn_like)
def randn_like(
    input: Slab,
    *,
    dtype: torch.dtype | None = None,
    generator: Generator | None = None,
    **options: Any,
) -> Slab:
    """Numbers of the standard normal distribution, in the shape of ``input``."""
    _check(torch.randn_like, input, generator, dtype or input.dtype)
    return _like(input, _normal(input), dtype, options)


@register(torch.bernoulli)
def bernoulli(input: Slab, p: float | None = None, *, generator: Generator | None = None) -> Slab:
    """Ones with the probability that each element of ``input``, or ``p``, says; else zeros."""
    _check(torch.bernoulli, input, generator, input.dtype)
    _require(p is None or 0 <= p <= 1, f"bernoulli wants a probability, got {p}")
    chance = input.local.detach() if p is None else p
    no_grad = input.local.nan_to_num() * 0  # torch's gradient of it is zero, not none
    return input.with_local(no_grad + (_uniform(input) < chance).to(input.dtype))


@register(Tensor.normal_)
def normal_(
    self: Slab, mean: float = 0, std: float = 1, *, generator: Generator | None = None
) -> Slab:
    """``self``, filled with numbers of a normal distribution."""
    _check(Tensor.normal_, self, generator, self.dtype)
    _require(std >= 0, f"normal_ wants a spread of at least 0, got {std}")
    self.local.copy_(_normal(self) * std + mean)
    return self


@register(Tensor.uniform_)
def uniform_(self: Slab, to: float = 0, end: float = 1, **options: Any) -> Slab:
    """``self``, filled with numbers from the first to below the second bound."""
    low, high = options.pop("from", to), options.pop("to", end)
    _check(Tensor.uniform_, self, options.pop("generator", None), self.dtype)
    _require(low <= high, f"uniform_ wants bounds that rise, got {low} and {high}")
    self.local.copy_(_as_dtype(_uniform(self), self.dtype) * (high - low) + low)
    return self


@register(Tensor.bernoulli_)
def bernoulli_(self: Slab, p: float = 0.5, *, generator: Generator | None = None) -> Slab:
    """``self``, filled with ones with probability ``p`` and else zeros."""
    if isinstance(p, Tensor | Slab):
        raise unsupported(
            Tensor.bernoulli_, self, "its probability is a tensor: use torch.bernoulli"
        )
    _check(Tensor.bernoulli_, self, generator, self.dtype)
    _require(0 <= p <= 1, f"bernoulli_ wants a probability, got {p}")
    self.local.copy_(_uniform(self) < p)
    return self


@register(Tensor.exponential_)
def exponential_(self: Slab, lambd: float = 1, *, generator: Generator | None = None) -> Slab:
    """``self``, filled with numbers of an exponential distribution."""
    _check(Tensor.exponential_, self, generator, self.dtype)
    _require(lambd > 0, f"exponential_ wants a rate above 0, got {lambd}")
    self.local.copy_(-torch.log1p(-_uniform(self)) / lambd)
    return self


@register(F.gumbel_softmax)
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
