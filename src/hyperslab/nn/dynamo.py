"""What Dynamo, which reads Python code for ``torch.compile``, is told of this package."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from torch._C._dynamo.eval_frame import (
    _FrameAction as FrameAction,
    _FrameExecStrategy as FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._dynamo.variables.torch import get_overridable_functions

from hyperslab.nn.depth_first import DepthFirst
from hyperslab.nn.graphed import Graphed
from hyperslab.nn.lone import Lone
from hyperslab.nn.parallelize import Parallel
from hyperslab.nn.registry import functions_with_rules
from hyperslab.nn.replica import Replica

_PACKAGES = tuple(
    f"hyperslab.{package}." for package in ("comm", "dist_ops", "kernels", "layout", "nn")
)
_CALL_USERS_MODULES = (
    Parallel.forward,
    Replica.__call__,
    Lone.__call__,
    Graphed.__call__,
    DepthFirst.__call__,
)


def _know_rules() -> None:
    """Has Dynamo ask Slabs for all functions that have rules.

    By itself it does not for ``F.sigmoid``, ``torch.randn_like``, ``torch.relu_`` and others.
    """
    get_overridable_functions().update(functions_with_rules())


def _run_as_written() -> None:
    """Keeps functions of this package from being compiled by themselves.

    Between two graphs, and in a backward pass, Dynamo takes up whatever Python calls. It still
    looks into functions that are called by what it compiles.
    """
    left = {function.__code__ for function in _CALL_USERS_MODULES}
    as_written = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for name, module in [*sys.modules.items()]:
        if name.startswith(_PACKAGES):
            for code in _codes_of(module):
                if code not in left:
                    set_code_exec_strategy(code, as_written)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in vars(value).values() if inspect.isclass(value) else (value,):
            for function in _functions_of(member):
                if code := getattr(inspect.unwrap(function), "__code__", None):
                    yield from _with_inner(code)


def _functions_of(member: Any) -> tuple[Any, ...]:
    if isinstance(member, property):
        return tuple(filter(None, (member.fget, member.fset)))
    return (getattr(member, "__func__", member),)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


_know_rules()
_run_as_written()
