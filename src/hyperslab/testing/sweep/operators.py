"""One operator: how it is spelled and what arguments it is tried on."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hyperslab.testing.sweep.arguments import Sample

Item = TypeVar("Item")
Function = Callable[..., Any]

_UNCOMPARED = """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_
    Tensor.resize Tensor.resize_as Tensor.resize_as_sparse_ Tensor.data_ptr Tensor.const_data_ptr
    Tensor.storage Tensor.untyped_storage Tensor.grad_fn Tensor.name
"""
"""Operators whose values mean nothing: memory that nobody wrote yet, addresses, names of nodes."""


@dataclass(frozen=True)
class Spelling:
    """One way to call an operator."""

    name: str
    """``function``, ``method``, ``in place``, ``operator``, or the name of an alias."""
    function: Function
    takes: Callable[[Sample], bool] = field(default=lambda sample: True, repr=False)
    """Which samples are called so."""


@dataclass(frozen=True)
class Operator:
    """One operator, by the name it has on the page."""

    name: str
    spellings: tuple[Spelling, ...]
    samples_of: Callable[[int], Iterator[Sample]] = field(repr=False)
    """Makes its samples, at most so many of the usual kind and a few of each other kind."""

    @property
    def compared(self) -> bool:
        return self.name not in _UNCOMPARED.split()


def spread(items: Sequence[Item], limit: int, key: str) -> list[Item]:
    """At most ``limit`` of ``items``, drawn evenly, the same ones whenever ``key`` is."""
    if len(items) <= limit:
        return list(items)
    return [items[i] for i in sorted(random.Random(key).sample(range(len(items)), limit))]


def seed_all() -> None:
    """Lets all that draws random arguments draw the same ones on every rank."""
    # Not torch.manual_seed, which formats a stack for every kind of GPU that is not in use.
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the generator that torch's samples use


def as_call(function: Function) -> Function:
    """``function``, or the call ``x.name(...)`` if it is a method, which takes tensors alone."""
    name = getattr(function, "__name__", "")
    if getattr(Tensor, name, None) is not function:
        return function
    if name.startswith("__") and hasattr(operator, name):
        return getattr(operator, name)  # type: ignore[no-any-return]
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
