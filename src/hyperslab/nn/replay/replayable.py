"""Whether replays of a recorded pass would do the same as the pass itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from hyperslab.nn.outputs import is_record, tensors_of
from hyperslab.nn.replay.module_state import PLAIN, ModuleState, version_of
from hyperslab.nn.untouched import draws


class CannotReplayError(Exception):
    """Why a pass cannot be recorded; it runs as if nobody had tried."""


class Look:
    """How things are before a pass, to tell what it changes."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self.state = ModuleState(module, inputs[0].device)
        weights = [x for x in self.state.tensors if isinstance(x, Parameter)]
        self._fixed = [*weights, *inputs]
        self._versions = [*map(version_of, self._fixed)]
        self._torch, self._others = torch.get_rng_state(), draws()

    def check(self, waits: Sequence[str]) -> None:
        """Raises where a replay would not have done the same."""
        if waits:
            raise CannotReplayError(f"the host waits for the GPU in it, at {waits[0]}")
        if change := self.state.change():
            raise CannotReplayError(f"after it, {change}")
        if [*map(version_of, self._fixed)] != self._versions:
            raise CannotReplayError("it writes into its arguments or into a weight")
        if not torch.equal(torch.get_rng_state(), self._torch):
            raise CannotReplayError("it draws from torch's CPU generator")
        if draws() != self._others:
            raise CannotReplayError("it draws random numbers from Python or numpy")


def leaves_under(output: Tensor) -> dict[int, Tensor]:
    """The tensors, by ``id``, to which autograd brings gradients of ``output``."""
    if output.grad_fn is None:
        return {id(output): output}
    nodes, seen, found = [output.grad_fn], {output.grad_fn}, {}
    while nodes:
        node: Any = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return found


def check_output(out: Any, device: torch.device) -> None:
    rest = tree_leaves(out, is_leaf=is_record)
    strange = [x for x in rest if not (is_record(x) or isinstance(x, (Tensor, *PLAIN)))]
    if strange:
        raise CannotReplayError(f"it returns a {type(strange[0]).__name__}")
    if any(tensor.device != device for tensor in tensors_of(out)):
        raise CannotReplayError(f"it returns a tensor that is not on {device}")
