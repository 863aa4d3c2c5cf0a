"""The tensors in what a module returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hyperslab.nn.slab import Slab


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in ``value``, pieces of Slabs included.

    They may lie in tuples, lists, dicts and whatever else is a pytree, and in dataclasses.
    """
    found: list[Tensor] = []
    for leaf in tree_leaves(value, is_leaf=is_record):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Slab):
            found.append(leaf.local)
        elif is_record(leaf):
            found += tensors_of([getattr(leaf, field.name) for field in fields(leaf)])
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of each of its tensors in place of it."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Slab):
            return leaf.with_local(function(leaf.local))
        if is_record(leaf):
            held = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
            return replace(leaf, **map_tensors(function, held))
        return leaf

    return tree_map(visit, value, is_leaf=is_record)


def is_record(value: Any) -> bool:
    """Whether ``value`` is an object with fields, such as a Slab."""
    return is_dataclass(value) and not isinstance(value, type)
