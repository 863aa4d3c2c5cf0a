"""The operators of PyTorch's own test database, with its samples of their arguments."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hyperslab.testing.sweep.arguments import Sample
from hyperslab.testing.sweep.operators import (
    Function,
    Operator,
    Spelling,
    as_call,
    seed_all,
    spread,
)

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
