"""Random numbers of plain tensors within passes of a parallelized module.

Slabs draw numbers by their global index. A plain tensor, which every rank holds whole, draws what a
Slab of its shape would, so that one rank, where all tensors are plain, and several draw the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from hyperslab.comm.journal import journal
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.nn.dispatch import meetings
from hyperslab.nn.op import OPS, USERS, Function
from hyperslab.nn.single_rank.mode import active_mode
from hyperslab.nn.single_rank.served import SERVED
from hyperslab.nn.single_rank.wrapping import as_slab
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import (
    functional_builtins,
    is_traced,
    peek_interpreter_stack,
    substitute,
)

_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_FILLS = ("bernoulli_", "normal_", "uniform_", "exponential_")


class PlainDraws:
    """Within it, this thread's plain tensors draw the numbers of Slabs on ``mesh``.

    Where ``mesh`` is None, they draw torch's own.
    """

    __slots__ = ("_outer", "mesh")

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

    def __enter__(self) -> Self:
        self._outer, _thread.draws = _thread.draws, self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.draws = self._outer

    def apply(self, run: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run``, the ``apply`` of an autograd Function, gives.

        Within it numbers are torch's own, as they are when its backward pass computes some again.
        But a reentrant checkpoint computes all again, and can do it in the same way.
        """
        if run.__self__ is CheckpointFunction:  # type: ignore[attr-defined]
            return _apply_in_mode(run, (self._again(args[0]), *args[1:]), kwargs)
        with PlainDraws(None):
            return _apply_in_mode(run, args, kwargs)

    def again(self, function: Function) -> Function:
        """``function``, which runs as within this whenever it is called, as in a backward pass."""
        mode = active_mode()
        return self._again(function if mode is None else mode.again(function))

    def _again(self, function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with PlainDraws(self.mesh):
                return function(*args, **kwargs)

        return run


class _Thread(threading.local):
    draws: PlainDraws | None = None


_thread = _Thread()


def active_draws() -> PlainDraws | None:
    """That of the pass which this thread runs, if it runs one."""
    draws = _thread.draws
    return None if draws is None or draws.mesh is None else draws


def _apply_in_mode(run: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = active_mode()
    return run(*args, **kwargs) if mode is None else mode.apply(run, args, kwargs)


def substitute_draws() -> None:
    """Has torch's random functions of plain tensors ask ``active_draws``."""
    for name in _DROPOUTS:  # those of torch.nn.functional call the built-in ones
        rule, needs = OPS[getattr(torch, name)].rule, SERVED[getattr(torch, name)]
        substitute(functional_builtins, name, _drawing(rule, needs))
        substitute(functional_builtins, f"{name}_", _drawing(rule, needs, inplace=True))
        setattr(torch, name, getattr(functional_builtins, name))
    for owner, names in ((torch, ("rand_like", "randn_like", "bernoulli")), (Tensor, _FILLS)):
        for name in names:
            function = getattr(owner, name)
            substitute(owner, name, _drawing(OPS[function].rule, SERVED[function]))


def _drawing(rule: Function, needs: Function, **options: Any) -> Callable[..., Any]:
    """What runs in the place of a function: ``rule`` within passes, else the function itself."""

    def draw(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        draws = active_draws()
        x = args[0] if args else kwargs.get("input")
        if draws is None or not isinstance(x, Tensor) or function in USERS:
            return function(*args, **kwargs)
        if peek_interpreter_stack() is not None or is_traced():
            return function(*args, **kwargs)
        found, before = _own(x, draws.mesh), journal.count  # type: ignore[arg-type]
        if not needs(found.local if isinstance(found, Slab) else found, args, kwargs):
            return function(*args, **kwargs)
        slab = found if isinstance(found, Slab) else as_slab(found, draws.mesh)  # type: ignore[arg-type]
        given = [slab if arg is x else arg for arg in args]
        named = {name: slab if arg is x else arg for name, arg in kwargs.items()}
        try:
            out = rule(*given, **named, **options)
        except UnsupportedOp:  # of what Slabs cannot draw, such as integers
            return function(*args, **kwargs)
        finally:  # one rank may draw by itself
            journal.forget_since(before)
        return x if out is slab else out if out.layout.split_dims else out.local

    return draw


def _own(x: Tensor, mesh: Mesh) -> Slab | Tensor:
    """The Slab of a weight that is cut over ranks; else ``x``."""
    is_dtensor = isinstance(x, DTensor) and meetings.exist and mesh.num_ranks > 1
    found: Slab | Tensor = meetings.slab_of(x, mesh) if is_dtensor else x
    return found


def random_state(mesh: Mesh) -> bytes:
    """That of torch's generators; nothing where tensors have no values."""
    if is_traced() or peek_interpreter_stack() is not None:
        return b""
    state = torch.get_rng_state().numpy().tobytes()
    if mesh.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = torch.cuda.default_generators[mesh.device.index]
        state += b"%d %d" % (generator.initial_seed(), generator.get_offset())  # all it has
    return state


def note_draws(before: bytes, mesh: Mesh) -> None:
    """Has ranks compare the random state if numbers were drawn, by whatever, since ``before``."""
    now = random_state(mesh)
    if now != before:
        advice = "the state after random numbers were drawn: seed all ranks alike"
        journal.note(torch.get_rng_state, (advice, crc32(now)))
