"""Layers of dropout that give plain tensors the masks that Slabs would have.

Masks depend on the seed and the index alone, so that a model has the same ones on any mesh: also
where, on one rank, it runs without Slabs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import dropout

from hyperslab.dist_ops.random_bits import draw, num_drawn
from hyperslab.nn.depth_first.tile_slab import alone
from hyperslab.nn.watched_slab import Watch, WatchedSlab

_FORWARDS = {getattr(dropout, name).forward for name in dropout.__all__}


class Dropouts:
    """Torch's layers of dropout among ``modules``."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.watch: Watch | None = None
        """Who watches the present pass; None where it runs on plain tensors."""
        self.grad_mode = True
        self._forwards = [
            (part.__dict__, _Forward(part, self))
            for part in modules
            if isinstance(part, dropout._DropoutNd) and _is_free(part)
        ]

    @contextmanager
    def prepared(self, watch: Watch | None = None) -> Iterator[None]:
        """Within it they are ready for a pass on plain tensors, or for one that is watched."""
        self.watch, self.grad_mode = watch, torch.is_grad_enabled()
        for table, forward in self._forwards:
            table["forward"] = forward
        try:
            yield
        finally:
            self.watch = None
            for table, forward in self._forwards:
                if not forward.is_repeated:
                    table.pop("forward", None)


class _Forward:
    """The ``forward`` of ``layer``."""

    def __init__(self, layer: nn.Module, among: Dropouts) -> None:
        self._layer, self._among = layer, among
        self.is_repeated = False
        """Whether activation checkpointing will run it once more, after a pass on plain tensors."""

    def __call__(self, input: Any) -> Any:
        watch = self._among.watch
        if isinstance(input, WatchedSlab):  # which so does not see that numbers are drawn
            out = self._forward(input.inner)
            return input if out is input.inner else input.watch.show(out)
        if type(input) is not Tensor or not self._layer.training:
            return self._forward(input)
        if watch is not None:
            watch.need("a layer of dropout is given a plain tensor")
            return self._forward(input)
        self.is_repeated = self.is_repeated or self._is_checkpointed()
        return self._forward(alone(input)).local

    def _forward(self, input: Any) -> Any:
        return type(self._layer).forward(self._layer, input)

    def _is_checkpointed(self) -> bool:
        is_saved_otherwise = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return is_saved_otherwise or torch.is_grad_enabled() != self._among.grad_mode


def _is_free(part: nn.Module) -> bool:
    """Whether nobody has given it another ``forward`` than torch's."""
    own = part.__dict__.get("forward")
    return type(part).forward in _FORWARDS and (own is None or isinstance(own, _Forward))


class Draws:
    """The state of torch's generators, to tell whether others than ``draw`` take numbers."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = None
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._cuda = torch.cuda.default_generators[device.index or 0]
        self._offset = None if self._cuda is None else self._cuda.get_offset()
        self._state, self._count = torch.get_rng_state(), num_drawn()

    def are_all(self) -> bool:
        """Whether no others have taken any since then."""
        due = self._state
        if count := num_drawn() - self._count:
            generator = torch.Generator().set_state(self._state)
            for _ in range(count):
                draw(generator)
            due = generator.get_state()
        is_same = torch.equal(due, torch.get_rng_state())
        return is_same and (self._cuda is None or self._cuda.get_offset() == self._offset)
