"""Values of settings, as TOML has them, fitted to the annotations of what they are for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

NONE = "none"
"""The word that says None, which TOML has no word for, where None is welcome."""

LARGEST = 2**63
"""Whole numbers of TOML lie below it."""

_WORDS = {
    str: ("a string", "strings"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
}


class MisfitError(Exception):
    """A value that is not what an annotation asks for."""


def fit(value: object, annotation: Any) -> Any:
    """``value`` as ``annotation`` wants it: whole numbers as floats, lists as tuples.

    Raises ``MisfitError``.
    """
    if value == NONE and accepts(annotation, NoneType):
        return None
    for member in members(annotation):
        with suppress(MisfitError):
            return _fit_member(value, member)
    raise MisfitError


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def accepts(annotation: Any, wanted: Any) -> bool:
    """Whether ``wanted`` is a member of ``annotation``, without regard to what it contains."""
    return any((get_origin(each) or each) is wanted for each in members(annotation))


def expected(annotation: Any, value: object) -> str:
    """What ``annotation`` asks for, in words; ``value`` is what was given instead."""
    words = [_words(member) for member in members(annotation)]
    if isinstance(value, int | float) and not _is_in_range(value):
        words = [_with_range(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _fit_member(value: object, member: Any) -> Any:
    outer = get_origin(member) or member
    if outer is Any:
        return value
    if outer is float:
        return _finite(value)
    if outer is Sequence and isinstance(value, list | tuple):
        return tuple(fit(each, get_args(member)[0]) for each in value)
    if outer is Mapping and isinstance(value, Mapping):
        return {str(name): fit(each, get_args(member)[1]) for name, each in value.items()}
    if type(value) is not outer or (outer is int and not _is_in_range(value)):
        raise MisfitError
    return value


def _finite(value: object) -> float:
    if type(value) not in (int, float) or not _is_in_range(value):
        raise MisfitError
    return float(value)  # type: ignore[arg-type]


def _is_in_range(value: Any) -> bool:
    return math.isfinite(value) if isinstance(value, float) else -LARGEST <= value < LARGEST


def _with_range(word: str) -> str:
    return {"a number": "a finite number", "a whole number": "a whole number of 64 bits"}.get(
        word, word
    )


def _words(member: Any) -> str:
    if member is NoneType:
        return f'"{NONE}"'
    outer = get_origin(member) or member
    if outer is Sequence:
        inner = get_args(member)[0]
        return f"a list of {_WORDS[inner][1] if inner in _WORDS else 'tables'}"
    if outer is Mapping:
        inner = get_args(member)[1]
        words = " or ".join(_WORDS[each][1] for each in members(inner) if each is not Any)
        return f"a table of {words}" if words else "a table"
    return (
        "a string, a number, true or false, a list or a table" if outer is Any else _WORDS[outer][0]
    )
