"""Communication as one operator, for whoever looks at torch's operators, as a compiler does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import custom_op
from torch.utils._python_dispatch import _disable_current_modes as unwatched
from torch.utils._pytree import tree_map_only

__all__ = [
    "Kind",
    "as_operator",
    "cached_constants",
    "held_constants",
    "is_watched",
    "unwatched",
]

Made = TypeVar("Made", bound=Callable[..., Any])


class Kind(NamedTuple):
    """What a tensor is, but for its values."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class _Call(NamedTuple):
    run: Callable[[list[Tensor]], list[Tensor]]
    outputs: Sequence[Kind]


_calls: list[_Call] = []
"""What the operators in all graphs do, by number. Graphs live as long as the process."""


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.PROXY,
)


def is_watched() -> bool:
    """Whether operators are traced now, so that tensors may have no values.

    Modes that look on while values are computed, such as those that count FLOPs, change nothing.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def cached_constants(function: Made) -> Made:
    """``function``, whose tensors follow from its arguments alone, run once for each of them.

    It runs unwatched, so that what is kept has values; a graph gets constants with these values.
    """
    kept = lru_cache(maxsize=1024)(unwatched()(function))

    @wraps(function)
    def look_up(*args: Any, **kwargs: Any) -> Any:
        found = kept(*args, **kwargs)
        for holder in _holders:
            holder.append(found)
        return tree_map_only(Tensor, _as_constant, found) if is_watched() else found

    return cast(Made, look_up)


_holders: list[list[Any]] = []


@contextmanager
def held_constants() -> Iterator[list[Any]]:
    """Gives a list of all cached constants that are used within it, which keeps them alive."""
    held: list[Any] = []
    _holders.append(held)
    try:
        yield held
    finally:
        _holders.pop()


def _as_constant(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist(), dtype=x.dtype, device=x.device)


def as_operator(
    run: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Kind],
) -> list[Tensor]:
    """What ``run`` makes of ``inputs``: tensors of the kinds ``outputs``, as one opaque operator.

    Such operators keep their order in a graph, because messages are told apart by nothing else.
    Each has a number of its own, so that no two look the same and are merged.
    """
    _calls.append(_Call(run, outputs))
    out: list[Tensor] = communicate(list(inputs), len(_calls) - 1)
    return out


@custom_op("hyperslab::communicate", mutates_args=())
def communicate(inputs: list[Tensor], call: int) -> list[Tensor]:
    """Contiguous tensors of contiguous ones: a compiler may lay out its own as it likes."""
    received = _calls[call].run([x.contiguous() for x in inputs])
    return [out.contiguous() for out in received]


@communicate.register_fake
def _(inputs: list[Tensor], call: int) -> list[Tensor]:
    return [
        torch.empty(tuple(kind.shape), dtype=kind.dtype, device=kind.device)
        for kind in _calls[call].outputs
    ]


communicate.register_effect(EffectType.ORDERED)
