"""Functions that take tensors and are not in PyTorch's test database."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import GetSetDescriptorType

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_ignored_functions, get_overridable_functions, resolve_name

from hyperslab.testing.sweep.arguments import Sample, guessed_samples
from hyperslab.testing.sweep.operators import (
    Function,
    Operator,
    Spelling,
    as_call,
    seed_all,
    spread,
)

_LEFT_OUT = """
    Tensor.layout Tensor.register_hook Tensor.register_post_accumulate_grad_hook
    Tensor.share_memory_ Tensor.set_ Tensor.__reduce_ex__ Tensor.__setstate__ Tensor.__repr__
    Tensor.__format__ Tensor.__deepcopy__ Tensor.__array_wrap__ Tensor.__dlpack__
    Tensor.__dlpack_device__ Tensor.__cuda_array_interface__ Tensor.module_load
    Tensor.record_stream Tensor.backward autocast
"""
"""What a Slab has in its own right, and what is about the object rather than its numbers."""


def further_operators(names: Collection[str], known: Collection[Function]) -> Iterator[Operator]:
    """All functions that hand Slabs over, but those of these ``names`` and those ``known``."""
    for full_name, function in _overridable():
        name = full_name.removesuffix(".__get__")
        if name in names or function in known or _is_left_out(name):
            continue
        if _is_property(name) and name.removeprefix("Tensor.") in names:
            continue
        if spelled := _as_users_write(function, name):
            yield Operator(name, (Spelling("function", spelled),), _guesser(name, spelled))


def _is_left_out(name: str) -> bool:
    private = re.search(r"(^|\.)_(?!_)", name)
    return private is not None or name in _LEFT_OUT.split()


def _overridable() -> Iterator[tuple[str, Function]]:
    """Every function that hands Slabs over, and those of torch.nn.functional and Tensor beside."""
    for functions in get_overridable_functions().values():
        for function in functions:
            if name := resolve_name(function):
                yield name.removeprefix("torch.").removeprefix("functional."), function
    ignored = get_ignored_functions()
    for prefix, space in (("nn.functional.", F), ("Tensor.", Tensor)):
        for attribute, function in vars(space).items():
            own = getattr(function, "__module__", space.__name__) == space.__name__
            if attribute.startswith("_") or isinstance(function, type) or not callable(function):
                continue
            if own and function not in ignored:
                yield f"{prefix}{attribute}", function


_WRITTEN_OTHERWISE: Mapping[str, Function] = {
    "__bool__": bool,
    "__nonzero__": bool,
    "__int__": int,
    "__long__": int,
    "__float__": float,
    "__complex__": complex,
    "__len__": len,
    "__reversed__": reversed,
    "__div__": operator.truediv,
    "__idiv__": operator.itruediv,
    "__array__": lambda x: x.__array__(),
}


def _as_users_write(function: Function, name: str) -> Function | None:
    """How ``function`` reads in a program: ``x << 1`` for ``Tensor.__lshift__``, ``x.T``."""
    if not name.startswith("Tensor."):
        return as_call(function)
    attribute = name.removeprefix("Tensor.")
    if _is_property(name):
        return lambda x: getattr(x, attribute)
    if not attribute.startswith("__"):
        return as_call(getattr(Tensor, attribute))
    if attribute in _WRITTEN_OTHERWISE:
        return _WRITTEN_OTHERWISE[attribute]
    if hasattr(operator, attribute):
        return getattr(operator, attribute)  # type: ignore[no-any-return]
    reflected = getattr(operator, attribute.replace("__r", "__", 1), None)
    return None if reflected is None else lambda x, y: reflected(y, x)


def _is_property(name: str) -> bool:
    attribute = getattr(Tensor, name.removeprefix("Tensor."), None)
    return isinstance(attribute, GetSetDescriptorType | property)


def _guesser(name: str, function: Function) -> Callable[[int], Iterator[Sample]]:
    def samples(limit: int) -> Iterator[Sample]:
        seed_all()
        accepted = list(guessed_samples(name, function))
        yield from spread(accepted, limit, name)

    return samples
