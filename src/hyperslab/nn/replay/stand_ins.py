"""Weights of a module for a pass that is recorded, in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn import Parameter

from hyperslab.nn.replay.replayable import CannotReplayError


class StandIns:
    """For each weight of ``module`` one that no other pass has used.

    Autograd brings the gradient of a weight to the stream on which the weight was used first, as
    long as anyone holds that pass; a recording cannot leave its own stream. Nor do hooks that
    weights have for their gradients belong in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights = [*module.parameters()]
        self.twins = [_twin_of(weight) for weight in self.weights]
        twins = {id(weight): twin for weight, twin in zip(self.weights, self.twins, strict=True)}
        self._places = [
            (part._parameters, name, weight, twins[id(weight)])
            for part in module.modules()
            for name, weight in part._parameters.items()
            if weight is not None
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it the module has them in place of its weights."""
        for table, name, _, twin in self._places:
            table[name] = twin
        try:
            yield
        finally:
            for table, name, weight, _ in self._places:
                table[name] = weight

    def check(self) -> None:
        if any(twin.grad is not None for twin in self.twins):
            raise CannotReplayError("its backward pass adds to gradients of weights by itself")
        pairs = zip(self.weights, self.twins, strict=True)
        if any(weight.data_ptr() != twin.data_ptr() for weight, twin in pairs):
            raise CannotReplayError("it moves weights in memory, as recurrent layers do")


def _twin_of(weight: Parameter) -> Parameter:
    if type(weight) is not Parameter:
        raise CannotReplayError(f"a weight is a {type(weight).__name__}")
    twin = Parameter(weight.detach(), weight.requires_grad)
    twin.__dict__.update(weight.__dict__)
    return twin
