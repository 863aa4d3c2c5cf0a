"""From a torch function of Slabs to the rule that computes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from hyperslab.comm.journal import journal
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.nn.op import OPS, Function, Rule, is_operand, name_of
from hyperslab.torch_private import is_forward_ad_active, tree_leaves


def dispatch(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``function`` returns for the global tensors, by its rule.

    Where there is no rule, or it refuses these arguments, ``run_whole`` handles them.
    """
    if is_dynamo_compiling():
        from hyperslab.nn.compile import dispatch_in_graph  # loads the compiler

        return dispatch_in_graph(function, args, kwargs)
    if waiting.calls:
        materialise(function, args)
    if meetings.exist:
        args, kwargs = meetings.prepare(function, args, kwargs)
    if journal.has_readers:
        journal.add(function, (*args, *kwargs.values()) if kwargs else args)
        if is_grad_enabled() or is_forward_ad_active():
            args, kwargs = _PREPARE[0](function, args, kwargs)
    try:
        op = OPS.get(function)
        if op is None or (kwargs and kwargs.get("out") is not None):
            return _run_whole(function, args, kwargs)
        out = _SINGLE_RANK[0](op, args, kwargs)
        if out is not NotImplemented:
            return out
        try:
            out = op.rule(*args, **op.keywords(kwargs)) if kwargs else op.rule(*args)
        except UnsupportedOp as refusal:
            out = _run_whole(function, args, kwargs, refusal)
        if op.family == "custom":
            check_pieces(function, out)
        if meetings.with_spread_weights and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(meetings.localize_gradient)
        return out
    except Exception as error:
        _explain(error, function, args, kwargs)
        raise


def check_pieces(function: Function, out: Any) -> None:
    """Raises unless each Slab in ``out``, of a rule of the user's, has a piece of its box's shape.

    Others would compute with such a piece as if it were what the layout says.
    """
    for leaf in tree_leaves(out, is_leaf=is_operand):
        if hasattr(leaf, "with_local") and tuple(leaf.local.shape) != leaf.box.shape:
            raise LayoutError(
                f"the rule of {name_of(function)} gives a piece of shape "
                f"{tuple(leaf.local.shape)}, and this rank's box of a tensor of "
                f"{leaf.layout.describe()} has shape {leaf.box.shape}: give with_local the layout "
                "of the result too"
            )


def _run_whole(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refusal: UnsupportedOp | None = None,
) -> Any:
    from hyperslab.nn.ops.whole import run_whole  # which knows Slabs, and they know this file

    return run_whole(function, args, kwargs, refusal)


_SINGLE_RANK: list[Callable[..., Any]] = []


def on_single_rank(run: Rule) -> Rule:
    """Makes the decorated function what, on one rank, computes an Op of some arguments.

    It returns ``NotImplemented`` where the Op's rule is to do it.
    """
    _SINGLE_RANK[:] = [run]
    return run


_PREPARE: list[Callable[..., Any]] = []


def prepare_arguments(prepare: Rule) -> Rule:
    """Makes the decorated function what, on several ranks, gives the arguments as rules get them.

    It gets the function, its arguments and its keyword arguments.
    """
    _PREPARE[:] = [prepare]
    return prepare


class _Meetings:
    """How what is not on the mesh of a Slab gets there: cut weights, Slabs of its siblings."""

    exist = False
    """Whether any module has such weights, or parts that are cut in other ways."""
    prepare: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    """Takes a function, its arguments and its keyword arguments."""
    slab_of: Callable[[Any, Any], Any]
    """Takes a tensor and a mesh; the Slab of a cut weight, or the tensor itself."""
    with_spread_weights = False
    """Whether weights of any module are DTensors, which losses may meet."""
    localize_gradient: Callable[[Any], Any]
    """Takes the gradient of a plain tensor; that of a loss which met a DTensor is one."""


meetings = _Meetings()


def before_meetings(prepare: Rule) -> Rule:
    """Makes the decorated function what brings arguments to one mesh."""
    meetings.prepare = prepare
    return prepare


class _Waiting(threading.local):
    """What is deferred until the next function that a thread calls."""

    def __init__(self) -> None:
        self.calls: list[Callable[..., bool]] = []


waiting = _Waiting()


def before_next(wait: Callable[[Function, tuple[Any, ...]], bool]) -> None:
    """Has ``wait`` called with the next function and its arguments, and on while it is true."""
    waiting.calls.append(wait)


def materialise(function: Function, args: tuple[Any, ...]) -> None:
    """Computes what is deferred, unless ``function``, which is called next, consumes it."""
    asked, waiting.calls = waiting.calls, []  # should one raise, it is not asked again
    waiting.calls += [wait for wait in asked if wait(function, args)]


def _explain(
    error: Exception, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds to ``error`` the operator that raised it and its Slabs, if that is not there yet."""
    if hasattr(error, "__notes__"):
        return
    leaves = tree_leaves((args, kwargs), is_leaf=is_operand)
    shown = ", ".join(str(leaf) for leaf in leaves if hasattr(leaf, "with_local"))
    error.add_note(f"in {name_of(function)} of {shown}")
