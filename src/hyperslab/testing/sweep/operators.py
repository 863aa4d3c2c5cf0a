"""The operators that are swept: how each is spelled and what arguments it is tried on."""

from __future__ import annotations

import operator
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from types import GetSetDescriptorType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_ignored_functions, get_overridable_functions, resolve_name

from hyperslab.testing.sweep.arguments import Sample, guessed_samples

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


# The operators of PyTorch's own test database, with its samples of their arguments

BASE_DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
"""The first of these that an operator takes is the one most of its samples have."""

FURTHER_DTYPES = (torch.int64, torch.bool)


def database() -> list[Any]:
    """PyTorch's own list of operators with samples of their arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Imported late: it fixes settings of torch.backends for the whole process.
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def functions_of(info: Any) -> Iterator[Function]:
    variants = (
        info.op,
        info.method_variant,
        info.inplace_variant,
        info.operator_variant,
        info.inplace_operator_variant,
    )
    yield from filter(callable, variants)
    for alias in info.aliases:
        yield from filter(callable, (alias.op, alias.method_variant, alias.inplace_variant))


def from_database(info: Any) -> Operator:
    named = {
        "function": _unwrapped(info.op, info.name),
        "method": _unwrapped(info.method_variant, f"Tensor.{info.name}"),
        "in place": _unwrapped_in_place(info),
        "operator": info.operator_variant,
        "in-place operator": info.inplace_operator_variant,
    }
    for alias in info.aliases:
        named[alias.name] = alias.op
        named[f"{alias.name}, method"] = alias.method_variant
        named[f"{alias.name}, in place"] = alias.inplace_variant
    unlike: dict[Function, str] = {}
    for name, function in named.items():
        if callable(function):
            unlike.setdefault(function, name)
    spellings = [Spelling(name, as_call(function)) for function, name in unlike.items()]
    spellings.append(_written_view(spellings[0].function))
    return Operator(info.full_name, tuple(spellings), lambda limit: _database_samples(info, limit))


def _written_view(function: Function) -> Spelling:
    """The call, followed by a write into its result where that is a view of an argument."""

    def write(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs).mul_(3)

    def can_be_written(sample: Sample) -> bool:
        tensors = [tensor.clone() for tensor in sample.tensors]
        args, kwargs = sample.with_tensors(tensors)
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            view = write(*args, **kwargs)
            return view._is_view() and all(view is not tensor for tensor in tensors)
        return False

    return Spelling("view, written", write, can_be_written)


def _unwrapped(function: Function | None, name: str) -> Function | None:
    """The function of that name, if ``function`` only seeds the generator and then calls it."""
    code = getattr(function, "__code__", None)
    if code is None or "wrapper_set_seed" not in code.co_names:
        return function
    for spelled in (name, f"Tensor.{name}_", f"Tensor.{name}"):
        try:
            return operator.attrgetter(spelled)(torch)  # type: ignore[no-any-return]
        except AttributeError:
            continue
    return function


def _unwrapped_in_place(info: Any) -> Function | None:
    function: Function | None = info.inplace_variant
    plain = _unwrapped(function, info.name)
    return function if plain is function or plain is None else partial(plain, inplace=True)


def _database_samples(info: Any, limit: int) -> Iterator[Sample]:
    base = next((dtype for dtype in BASE_DTYPES if dtype in info.dtypes), torch.float64)
    yield from _of_dtype(info, base, limit)
    for dtype in FURTHER_DTYPES:
        if dtype in info.dtypes and dtype != base:
            yield from _of_dtype(info, dtype, max(1, limit // 6))
    if info.error_inputs_func is not None:
        seed_all()
        # Not info.error_inputs, which looks for the test it is used by in all frames, every time.
        made = info.error_inputs_func(info, torch.device("cpu"))
        errors = _drawn(each.sample_input for each in made)
        yield from _numbered("error", errors, max(1, limit // 4), info.full_name)


def _of_dtype(info: Any, dtype: torch.dtype, limit: int) -> Iterator[Sample]:
    seed_all()
    drawn = _drawn(info.sample_inputs_func(info, torch.device("cpu"), dtype, False))
    return _numbered(str(dtype).removeprefix("torch."), drawn, limit, info.full_name)


def _drawn(samples: Iterable[Any]) -> list[Any]:
    """The samples, as far as they can be made here: some want a GPU, or a package."""
    made: list[Any] = []
    with suppress(Exception):
        made.extend(samples)
    return made


def _numbered(kind: str, drawn: list[Any], limit: int, key: str) -> Iterator[Sample]:
    for number, sample in spread(list(enumerate(drawn)), limit, key):
        yield Sample(f"{kind} {number}", (sample.input, *sample.args), dict(sample.kwargs))


# Functions that take tensors and are not in PyTorch's test database

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


@cache
def operators() -> Mapping[str, Operator]:
    """The operators of PyTorch's database, then what else takes tensors, by name."""
    listed = {each.name: each for each in map(from_database, database())}
    known = {function for info in database() for function in functions_of(info)}
    return listed | {each.name: each for each in further_operators(listed, known)}
