"""A pass of a module on tensors of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hyperslab.dist_ops.random_bits import NUM_VALUES, draw, drawing_from
from hyperslab.nn.cuda_graphs.module_state import PLAIN
from hyperslab.nn.cuda_graphs.replayable import CannotReplayError, leaves_under, saved_under
from hyperslab.nn.outputs import tensors_of
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_flatten, tree_unflatten

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a pass."""

Places = frozenset[int]
"""Of some of the tensors that a pass returns."""


class OwnPass:
    """A pass like that of ``run`` on ``given``, to be run again and again in the same memory.

    Its inputs, the seeds of its random numbers and the gradients of its outputs are tensors that
    can be filled with other values before each run.
    """

    def __init__(self, run: Callable[..., Any], module: nn.Module, given: Given) -> None:
        leaves, self._spec = tree_flatten(given, is_leaf=is_slab)
        self._run, self._makers, self._module = run, [_maker(leaf) for leaf in leaves], module
        self.inputs = [_twin(tensor) for tensor in tensors_in(leaves)]
        self.device, self._wants = self.inputs[0].device, [x.requires_grad for x in self.inputs]
        self.seeds, self.stand_ins = Seeds(self.device), StandIns(module)
        self.out: Any = None
        """What the last run returned."""
        self.outputs: list[Tensor] = []
        """The tensors in it."""
        self.grads: dict[int, Tensor] = {}
        """The gradients of outputs, by their places; those without any are not here."""
        self.ways: list[Places] = []
        """Which outputs' gradients have a backward pass of their own; the last one is of all."""

    def forward(self) -> list[Tensor]:
        tensors = iter(self.inputs)
        args, kwargs = tree_unflatten([make(tensors) for make in self._makers], self._spec)
        with self.stand_ins.installed(), self.seeds.given(), _without_autocast_cache():
            self.out = self._run(*args, **kwargs)
            self.outputs = tensors_of(self.out)
        return self.outputs

    def backward(self, way: Places) -> Sequence[Tensor | None]:
        """The gradients of inputs and weights, as ``sources`` has them."""
        outputs, grads = [self.outputs[i] for i in way], [self.grads[i] for i in way]
        with (
            self.stand_ins.installed(),
            self.seeds.refused(),
            torch.autocast(self.device.type, enabled=False),
            torch.autograd.set_multithreading_enabled(False),  # who draws does it in this thread
        ):
            sources, others_follow = self._own_sources(), way != self.ways[-1]
            return torch.autograd.grad(
                outputs, sources, grads, retain_graph=others_follow, allow_unused=True
            )

    def run(self) -> None:
        self.forward()
        for way in self.ways:
            self.backward(way)

    def forget(self) -> None:
        """Lets go of what the last run keeps; autograd will know nothing of it."""
        self.out, self.outputs = None, []
        self.inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        self.stand_ins = StandIns(self._module)

    def find_sources(self, usual: Places | None) -> None:
        """Looks, after a forward pass, where gradients come from and go to.

        Those of the outputs ``usual`` are expected to come together.
        """
        found = {i: leaves_under(out) for i, out in enumerate(self.outputs) if out.requires_grad}
        leaves = {key for each in found.values() for key in each}
        wanted = [place for place, own in enumerate(self.inputs) if id(own) in leaves]
        twins = enumerate(self.stand_ins.twins)
        reached = [place for place, twin in twins if id(twin) in leaves]
        if [x.requires_grad for x in self.inputs] != self._wants:
            raise CannotReplayError("it decides that an argument gets gradients")
        if len(leaves) > len(wanted) + len(reached):
            raise CannotReplayError("a tensor gets gradients that is no weight of the module")
        self._wanted, self._reached = wanted, reached
        self.reach = {i: [id(s) in each for s in self._own_sources()] for i, each in found.items()}
        self.grads = {place: torch.ones_like(self.outputs[place]) for place in found}
        every = Places(found)
        ways = [usual, every] if usual and usual < every else [every]
        self.ways = ways if every else []
        self.saved = saved_under(self.outputs)

    def _own_sources(self) -> list[Tensor]:
        return self.sources(self.inputs, self.stand_ins.twins)

    def sources(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``inputs`` and ``weights`` that get gradients."""
        return [inputs[i] for i in self._wanted] + [weights[i] for i in self._reached]


def tensors_in(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, pieces of Slabs included."""
    found = [leaf.local if isinstance(leaf, Slab) else leaf for leaf in leaves]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _maker(leaf: Any) -> Callable[[Iterator[Tensor]], Any]:
    """What makes an argument like ``leaf``, of the next of some tensors if it is one."""
    if type(leaf) in PLAIN:
        return lambda tensors: leaf
    if not isinstance(leaf, Slab):
        return next
    layout, mesh = leaf.layout, leaf.mesh
    return lambda tensors: Slab(next(tensors), layout, mesh)


def _twin(tensor: Tensor) -> Tensor:
    """A tensor like it, of the same values, in memory of its own."""
    twin = tensor.detach().clone()
    return twin.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


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


class Seeds:
    """What a pass draws, in a tensor that is filled anew before each replay.

    The numbers are those that an ordinary pass would draw, in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: Tensor | None = None
        self._num_drawn = 0

    @contextmanager
    def given(self) -> Iterator[None]:
        """Within it a pass draws from here. The first one tells how many numbers there are."""
        if self._num_drawn and self._numbers is None:
            self._numbers = torch.zeros(self._num_drawn, 2, dtype=torch.int64, device=self._device)
        self._num_drawn = 0
        with drawing_from(self._draw):
            yield

    def _draw(self) -> Tensor:
        number, self._num_drawn = self._num_drawn, self._num_drawn + 1
        if self._numbers is None:
            return draw().to(self._device)
        if number == len(self._numbers):
            raise CannotReplayError("it does not draw as many random numbers in every pass")
        return self._numbers[number]

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Within it nothing may be drawn, as in a backward pass."""

        def refuse() -> Never:
            raise CannotReplayError(
                "it draws random numbers in its backward pass, as activation checkpointing does"
            )

        with drawing_from(refuse):
            yield

    def refill(self) -> None:
        """Draws for the next replay."""
        if self._numbers is not None:
            drawn = torch.randint(NUM_VALUES, self._numbers.shape)
            self._numbers.copy_(drawn, non_blocking=True)  # CUDA reads what is not pinned at once
