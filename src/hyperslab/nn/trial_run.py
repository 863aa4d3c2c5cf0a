"""A forward pass that is tried out: it leaves no trace, and may run on tensors without values."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hyperslab.comm.journal import journal
from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.kernels.tiles import autocast_as_now
from hyperslab.nn.module_snapshot import ModuleSnapshot, ParameterSlots
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fake_tensor_mode,
    tree_leaves,
    untraced,
)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def no_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it no hooks run; after it modules are as they were, and so are random numbers.

    What a forward pass keeps for the next, such as a mask that it makes once, it has to make again:
    ``ModuleSnapshot`` puts attributes back. torch's random state is not put back: for tensors
    without values it draws no numbers.
    """
    before = ModuleSnapshot(module, device)
    for part in before.parts:
        part.__dict__.update({name: OrderedDict() for name in HOOKS})
    try:
        with same_draws():
            yield
    finally:
        before.restore()


@contextmanager
def same_draws() -> Iterator[tuple[object, ...]]:
    """After it, Python and numpy draw the numbers that they would have drawn without it."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - as users may
    try:
        yield rng_states()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def rng_states() -> tuple[object, ...]:
    """What changes when Python or numpy draw numbers."""
    return random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


class ReadOnly(TorchDispatchMode):
    """Refuses to write into tensors with values."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.is_write and any(map(_has_values, tree_leaves(value))):
                raise UnsupportedOp(
                    f"{func} writes into a tensor of the module, which would happen once for every "
                    "tile of a depth-first chain (BatchNorm in training does so): name modules "
                    "without it in depth_first"
                )
        return func(*args, **kwargs)


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


class Trial(NamedTuple):
    """What modules compute with in a trial run."""

    leaves: list[nn.Parameter]
    """They stand for the parameters of the modules."""
    mode: FakeTensorMode


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


@contextmanager
def trial_run(
    modules: Sequence[nn.Module],
    device: torch.device,
    guard: ReadOnly,
    save: Callable[[Tensor], Tensor] = _as_it_is,
) -> Iterator[Trial]:
    """Within it, ``modules`` compute on tensors without values, and make graphs of their own.

    ``guard`` sees every operator and ``save``
    what autograd saves; nobody else notices: no tracer, no journal, no hooks of saved tensors.
    """
    slots, mode = ParameterSlots(modules), fake_tensor_mode()
    leaves = [nn.Parameter(p.detach(), p.requires_grad) for p in slots.parameters]
    with ExitStack() as stack:
        for context in (
            untraced(),
            torch.inference_mode(False),
            torch.enable_grad(),
            autocast_as_now(device)(),
            saved_tensors_hooks(save, _as_it_is),
            unjournaled(),
            slots.replaced(leaves),
            mode,
            guard,
        ):
            stack.enter_context(context)
        yield Trial(leaves, mode)


def without_values(x: Slab) -> Tensor:
    """A leaf like the whole of ``x``, in a trial run."""
    like: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "requires_grad": x.requires_grad}
    return torch.empty(x.shape, memory_format=memory_format_of(x.local), **like)


@contextmanager
def unjournaled() -> Iterator[None]:
    """Within it, operators are not compared with those of other ranks."""
    count = journal.count
    try:
        yield
    finally:
        journal.forget_since(count)
