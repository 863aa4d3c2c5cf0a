"""Which rule computes which torch function on Slabs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from operator import index
from types import MethodType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, cast

from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from hyperslab.comm.journal import journal
from hyperslab.errors import UnsupportedOp

if TYPE_CHECKING:
    from hyperslab.nn.slab import Slab

Rule = TypeVar("Rule", bound=Callable[..., Any])

_RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
_num_registered = 0
_users: set[Callable[..., Any]] = set()
"""The functions whose rules are not ours."""


def register(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Makes the decorated rule what runs when one of ``functions`` gets a Slab.

    The rule takes the function's own arguments, Slabs among them, and returns Slabs (or a plain
    tensor that is equal on every rank). It replaces an earlier rule.

    ```python
    @hs.register(torch.special.entr)
    def entr(x):
        return x.with_local(torch.special.entr(x.local))
    ```
    """

    def keep(rule: Rule) -> Rule:
        global _num_registered
        _RULES.update(dict.fromkeys(functions, rule))
        _num_registered += 1
        is_ours = str(getattr(rule, "__module__", "")).startswith("hyperslab.")
        (_users.difference_update if is_ours else _users.update)(functions)
        return rule

    return keep


def rule_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule that runs when ``function`` gets a Slab."""
    return _RULES[function]


def num_registered() -> int:
    """How many rules have ever been registered, to tell whether some have changed."""
    return _num_registered


def has_rule(function: Callable[..., Any]) -> bool:
    return function in _RULES


def functions_with_rules() -> Iterable[Callable[..., Any]]:
    return _RULES.keys()


def has_users_rules() -> bool:
    """Whether there are rules that are not ours."""
    return bool(_users)


def integers(value: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """One number, or several, as torch reads them: numpy's integers are as good as Python's."""
    if type(value) is not tuple and hasattr(value, "__index__"):
        return (index(value),)  # type: ignore[arg-type]
    return tuple(map(index, value))


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def numpy_names(rule: Rule) -> Rule:
    """The rule with ``axis`` and ``keepdims`` as further names of ``dim`` and ``keepdim``."""

    @wraps(rule)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return rule(*args, **{_NUMPY_NAMES.get(name, name): arg for name, arg in kwargs.items()})

    return cast(Rule, renamed)


def dispatch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``function`` returns for the global tensors, by its rule.

    Where there is no rule, or it refuses these arguments, the default handles them.
    """
    if is_dynamo_compiling():
        from hyperslab.nn.compile import dispatch_in_graph  # loads the compiler

        return dispatch_in_graph(function, args, kwargs)
    if _WAITING.calls:
        settle(function, args)
    if journal.has_readers:
        journal.add(function, (*args, *kwargs.values()) if kwargs else args)
        if is_grad_enabled():
            args, kwargs = _PREPARE[0](function, args, kwargs)
    try:
        rule = _RULES.get(function)
        if rule is None or kwargs.get("out") is not None:
            return _DEFAULT[0](function, args, kwargs)
        try:
            return rule(*args, **kwargs)
        except UnsupportedOp as refusal:
            return _DEFAULT[0](function, args, kwargs, refusal)
    except Exception as error:
        _explain(error, function, args, kwargs)
        raise


_PREPARE: list[Callable[..., Any]] = []


def prepare_arguments(prepare: Rule) -> Rule:
    """Makes the decorated function what, on several ranks, gives the arguments as rules get them.

    It gets the function, its arguments and its keyword arguments.
    """
    _PREPARE[:] = [prepare]
    return prepare


class _Waiting(threading.local):
    """What waits for the next function that a thread calls."""

    def __init__(self) -> None:
        self.calls: list[Callable[..., bool]] = []


_WAITING = _Waiting()


def before_next(settle: Callable[[Callable[..., Any], tuple[Any, ...]], bool]) -> None:
    """Has ``settle`` called with the next function and its arguments, and on while it is true."""
    _WAITING.calls.append(settle)


def settle(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Has computed what waits for another function than this one, which is called next."""
    asked, _WAITING.calls = _WAITING.calls, []  # should one raise, it is not asked again
    _WAITING.calls += [wait for wait in asked if wait(function, args)]


def _explain(
    error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds to ``error`` the operator that raised it and its Slabs, if that is not there yet."""
    if hasattr(error, "__notes__"):
        return
    slabs = tree_leaves((args, kwargs), is_leaf=lambda leaf: hasattr(leaf, "with_local"))
    shown = ", ".join(str(leaf) for leaf in slabs if hasattr(leaf, "with_local"))
    error.add_note(f"in {name_of(function)} of {shown}")


_DEFAULT: list[Callable[..., Any]] = []


def register_default(rule: Rule) -> Rule:
    """Makes the decorated function what handles functions that have no rule.

    It gets the function, its arguments, its keyword arguments and, if a rule refused, that error.
    """
    _DEFAULT[:] = [rule]
    return rule


def unsupported(function: Callable[..., Any], slab: Slab, why: str = "") -> UnsupportedOp:
    """The error to raise where ``function`` has no exact rule for ``slab``."""
    reason = why or "there is no rule for it on a split tensor"
    return UnsupportedOp(
        f"{name_of(function)} cannot run on a tensor of {slab.layout.describe()} (rank "
        f"{slab.mesh.rank} holds {'x'.join(map(str, slab.box.shape))}): {reason}. Call "
        "hyperslab.gather(x) first to have the whole tensor on every rank, or add a rule with "
        f"hyperslab.register({name_of(function)})"
    )


def name_of(function: Callable[..., Any]) -> str:
    """The function as a user would write it, such as ``torch.roll`` or ``torch.Tensor.roll``."""
    if isinstance(function, MethodType):  # of a class, as ``MyFunction.apply``
        owner: Any = function.__self__
        return f"{owner.__module__}.{owner.__qualname__}.{function.__name__}"
    name = getattr(function, "__qualname__", repr(function))
    return resolve_name(function) or f"{getattr(function, '__module__', '')}.{name}".lstrip(".")
