"""The tensors in what a module returns, and the graph under them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import FrozenInstanceError, fields, is_dataclass
from types import GeneratorType
from typing import Any

from torch import Tensor

from hyperslab.errors import UnsupportedOp
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import tree_leaves, tree_map

_LAZY = (GeneratorType, map, filter, zip)


def check_computed(value: Any) -> None:
    """Raises where a module returns code that is yet to run, or a tuple, list or dict with such."""
    values = value.values() if isinstance(value, dict) else value
    for each in (value, *values) if isinstance(value, tuple | list | dict) else (value,):
        if isinstance(each, _LAZY):
            raise UnsupportedOp(
                f"forward of a parallelized module returns a {type(each).__name__}, whose code "
                "would run after the pass, where other rules hold: return a list or a tuple"
            )


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in ``value``, pieces of Slabs included.

    They may lie in tuples, lists, dicts and whatever else is a pytree, and in dataclasses.
    """
    if type(value) is Slab:  # as most are, in a tenth of the time
        return [value.local]
    found: list[Tensor] = []
    for leaf in tree_leaves(value, is_leaf=is_record):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Slab):
            found.append(leaf.local)
        elif is_record(leaf):
            found += tensors_of([*fields_of(leaf).values()])
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of each of its tensors in place of it."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Slab):
            return leaf.with_local(function(leaf.local))
        if is_record(leaf):
            values = [map_tensors(function, value) for value in fields_of(leaf).values()]
            return replaced(leaf, dict(zip(fields_of(leaf), values, strict=True)))
        return leaf

    if type(value) is Slab:
        return visit(value)
    return tree_map(visit, value, is_leaf=is_record)


def is_record(value: Any) -> bool:
    """Whether ``value`` is an object with fields, such as a Slab."""
    return is_dataclass(value) and not isinstance(value, type)


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of ``record`` that are set, in their order."""
    names = [field.name for field in fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def replaced(record: Any, values: dict[str, Any]) -> Any:
    """A copy with other values. It is not made anew, as that may compute fields from others."""
    made = copy(record)
    for name, value in values.items():
        try:
            setattr(made, name, value)
        except FrozenInstanceError:
            object.__setattr__(made, name, value)
    return made


def leaves_under(output: Tensor) -> dict[int, Tensor]:
    """The tensors, by ``id``, to which autograd brings gradients of ``output``."""
    if output.grad_fn is None:
        return {id(output): output}
    found = [getattr(node, "variable", None) for node in nodes_under([output])]
    return {id(leaf): leaf for leaf in found if isinstance(leaf, Tensor)}


def nodes_under(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the graph of ``outputs``, each once."""
    nodes = [output.grad_fn for output in outputs]
    seen = {None, *nodes}
    while nodes:
        node: Any = nodes.pop()
        if node is not None:
            yield node
            below = {function for function, _ in node.next_functions} - seen
            seen |= below
            nodes += below
