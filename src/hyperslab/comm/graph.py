"""Communication within graphs: one operator to a compiler, in order within checkpoints.

An activation checkpoint runs its part of the network again when the first tensor that it did not
keep is asked for, and that run sends messages too. Ranks must agree on which come first, and need
not ask at the same place: their pieces may be empty, or need no neighbours. So whatever sends
messages in a backward pass asks for a saved tensor before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.library import custom_op

from hyperslab.torch_private import (
    EffectType,
    has_saved_tensor_hooks,
    is_traced,
    tree_map_only,
    untraced,
)

Made = TypeVar("Made", bound=Callable[..., Any])


class TensorSpec(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class _Call(NamedTuple):
    run: Callable[[list[Tensor]], list[Tensor]]
    outputs: Sequence[TensorSpec]


_calls: list[_Call] = []
"""What the operators in all graphs do, by number. Graphs live as long as the process."""


def cached_constants(function: Made) -> Made:
    """Caches ``function`` by its arguments, from which alone its tensors must follow.

    It runs untraced, so that what is kept has values; a graph gets constants with these values.
    """
    kept = lru_cache(maxsize=1024)(untraced()(function))

    @wraps(function)
    def look_up(*args: Any, **kwargs: Any) -> Any:
        found = kept(*args, **kwargs)
        for holder in _holders:
            holder.append(found)
        return tree_map_only(Tensor, _as_constant, found) if is_traced() else found

    return cast(Made, look_up)


_holders: list[list[Any]] = []


@contextmanager
def held_constants() -> Iterator[list[Any]]:
    """Collects all cached constants that are used within it in a list, which keeps them alive."""
    held: list[Any] = []
    _holders.append(held)
    try:
        yield held
    finally:
        _holders.pop()


def _as_constant(x: Tensor) -> Tensor:
    with untraced():  # or a copy to the host would have no values
        values = x.tolist()
    return torch.tensor(values, dtype=x.dtype, device=x.device)


def as_operator(
    run: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[TensorSpec],
) -> list[Tensor]:
    """What ``run`` makes of ``inputs``, as one opaque operator; ``outputs`` says what that is.

    Such operators keep their order in a graph, because messages are told apart by nothing else.
    Each has a number of its own, so that no two look the same and are merged.
    """
    _calls.append(_Call(run, outputs))
    out: list[Tensor] = communicate(list(inputs), len(_calls) - 1)
    return out


@custom_op("hyperslab::communicate", mutates_args=())
def communicate(inputs: list[Tensor], call: int) -> list[Tensor]:
    """Runs the call of that number on contiguous tensors: a compiler may lay out its own freely."""
    received = _calls[call].run([x.contiguous() for x in inputs])
    return [out.contiguous() for out in received]


@communicate.register_fake
def _(inputs: list[Tensor], call: int) -> list[Tensor]:
    return [
        torch.empty(tuple(spec.shape), dtype=spec.dtype, device=spec.device)
        for spec in _calls[call].outputs
    ]


communicate.register_effect(EffectType.ORDERED)


def save_marker(ctx: Any, x: Tensor) -> None:
    """Saves an empty tensor for ``recompute_first``, in a forward pass that saves nothing else."""
    ctx.has_marker = has_saved_tensor_hooks()
    if ctx.has_marker:
        ctx.save_for_backward(x.new_empty(0))


def recompute_first(ctx: Any) -> None:
    """Has a checkpoint recompute now, before the backward pass of ``ctx`` sends messages."""
    if ctx.has_marker:  # or a second backward pass, which needs nothing, would be refused
        ctx.saved_tensors  # noqa: B018
