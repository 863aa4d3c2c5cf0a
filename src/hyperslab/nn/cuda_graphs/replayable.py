"""Whether replays of a recorded pass would do the same as the pass itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hyperslab.nn.module_snapshot import PLAIN, ModuleSnapshot, TensorVersions
from hyperslab.nn.outputs import fields_of, is_record, nodes_under, tensors_of
from hyperslab.nn.slab import Slab
from hyperslab.nn.trial_run import rng_states
from hyperslab.torch_private import tree_leaves


class CannotReplayError(Exception):
    """Why a pass cannot be recorded; it runs as if nobody had tried."""


class StateBefore:
    """How things are before a pass, to tell what it changes."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self.state = ModuleSnapshot(module, inputs[0].device)
        weights = [x for x in self.state.tensors if isinstance(x, Parameter)]
        self._fixed = TensorVersions([*weights, *inputs])
        self._torch, self._others = torch.get_rng_state(), rng_states()

    def check(self, waits: Sequence[str]) -> None:
        """Raises where a replay would not have done the same."""
        if waits:
            raise CannotReplayError(f"the host waits for the GPU in it, at {waits[0]}")
        if change := self.state.change():
            raise CannotReplayError(f"after it, {change}")
        if self._fixed.have_changed():
            raise CannotReplayError("it writes into its arguments or into a weight")
        if not torch.equal(torch.get_rng_state(), self._torch):
            raise CannotReplayError("it draws from torch's CPU generator")
        if rng_states() != self._others:
            raise CannotReplayError("it draws random numbers from Python or numpy")


def saved_under(outputs: Iterable[Tensor]) -> set[object]:
    """Where the memory begins of the tensors that autograd keeps for gradients of ``outputs``."""
    found: list[Any] = []
    for node in nodes_under(outputs):
        names = [n for n in dir(node) if n.startswith("_saved_") or n == "saved_tensors"]
        for name in names:
            with suppress(RuntimeError):  # the backward pass will tell
                found.append(getattr(node, name))
    return {_memory_of(x) for x in tree_leaves(found) if isinstance(x, Tensor)}


def sharing(tensors: Iterable[Tensor], memory: set[object]) -> list[Tensor]:
    """Those of ``tensors`` that lie in some of the memory that begins at ``memory``."""
    return [tensor for tensor in tensors if _memory_of(tensor) in memory]


def _memory_of(tensor: Tensor) -> object:
    """Where its memory begins, or itself where it has none."""
    has_memory = tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if has_memory else tensor


def check_state(snapshot: ModuleSnapshot) -> None:
    """Raises where changes of a module would not be noticed."""
    if snapshot.generators:
        raise CannotReplayError(
            f"it holds a {type(snapshot.generators[0]).__name__}, which may draw"
        )
    if snapshot.untracked:
        raise CannotReplayError(
            "it holds a tensor, sparse or of inference mode, whose changes nobody sees"
        )
    if any(not tensor.is_leaf for tensor in snapshot.tensors):
        raise CannotReplayError("a tensor of it was computed from its weights before")


def check_output(out: Any, device: torch.device, others: Iterable[Tensor]) -> None:
    """Raises where no copies can stand for ``out``, as where it shares memory with ``others``."""
    for leaf in _leaves(out):
        if not isinstance(leaf, (Tensor, Slab, *PLAIN)):
            raise CannotReplayError(f"it returns a {type(leaf).__name__}")
    tensors = tensors_of(out)
    if any(tensor.device != device or tensor.layout != torch.strided for tensor in tensors):
        raise CannotReplayError(f"it returns a tensor that is not on {device}, or not dense")
    if sharing(others, {_memory_of(tensor) for tensor in tensors}):
        raise CannotReplayError("it returns a tensor in memory of an argument or of the module")


def plain_values(out: Any) -> list[Any]:
    """What there is in ``out`` besides tensors."""
    return [leaf for leaf in _leaves(out) if isinstance(leaf, PLAIN)]


def _leaves(out: Any) -> Iterator[Any]:
    """What there is in ``out``, and in the fields of objects that hold nothing else."""
    for leaf in tree_leaves(out, is_leaf=is_record):
        if not is_record(leaf) or isinstance(leaf, Slab):
            yield leaf
        elif getattr(leaf, "__dict__", {}).keys() <= fields_of(leaf).keys():
            yield from _leaves([*fields_of(leaf).values()])
        else:
            yield leaf
