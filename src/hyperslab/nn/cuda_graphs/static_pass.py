"""A pass of a module whose inputs, weights, seeds and gradients lie at fixed places in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import SumsBeside
from hyperslab.dist_ops.random_bits import NUM_VALUES, draw, drawing_from
from hyperslab.nn.cuda_graphs.replayable import CannotReplayError, saved_under
from hyperslab.nn.module_snapshot import PLAIN, ParameterSlots
from hyperslab.nn.outputs import leaves_under, tensors_of
from hyperslab.nn.parallel.gradient_averaging import GradientMeans
from hyperslab.nn.parallel.outside_tensors import leave_part
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_flatten, tree_leaves, tree_unflatten

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a pass."""

OutputNumbers = frozenset[int]
"""Of some of the tensors that a pass returns."""


class StaticPass:
    """A pass like that of ``run`` on ``given``, to be run again and again in the same memory.

    Its inputs, the seeds of its random numbers and the gradients of its outputs are tensors that
    can be filled with other values before each run.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        module: nn.Module,
        given: Given,
        mesh: Mesh,
        *,
        averages: bool,
    ) -> None:
        """Where it ``averages``, gradients of weights are means over ranks, else parts of them."""
        leaves, self._spec = tree_flatten(given, is_leaf=is_slab)
        self._run, self._makers, self._module = run, [_maker(leaf) for leaf in leaves], module
        self.inputs = [_twin(tensor) for tensor in tensors_in(leaves)]
        self.device, self._wants = self.inputs[0].device, [x.requires_grad for x in self.inputs]
        self.seeds, self.weights = StaticSeeds(self.device), StaticWeights(module)
        self._mesh, self._sums = mesh, SumsBeside(mesh) if averages else None
        self.out: Any = None
        """What the last run returned."""
        self.outputs: list[Tensor] = []
        """The tensors in it."""
        self.grads: dict[int, Tensor] = {}
        """The gradients of outputs, by their places; those without any are not here."""
        self.gradient_sets: list[OutputNumbers] = []
        """Outputs whose gradients have a backward pass of their own; the last set has all."""

    def forward(self) -> list[Tensor]:
        tensors = iter(self.inputs)
        args, kwargs = tree_unflatten([make(tensors) for make in self._makers], self._spec)
        with self.weights.installed(), self.seeds.given(), _without_autocast_cache():
            self.out = self._run(*args, **kwargs)
            self.outputs = tensors_of(self.out)
        return self.outputs

    def backward(self, wanted: OutputNumbers) -> Sequence[Tensor | None]:
        """The gradients of inputs and weights, as ``sources`` has them."""
        outputs = [self.outputs[i] for i in wanted]
        grads = [self.grads[i] for i in wanted]
        with (
            self.weights.installed(),
            self.seeds.refused(),
            torch.autocast(self.device.type, enabled=False),
            torch.autograd.set_multithreading_enabled(False),  # who draws does it in this thread
        ):
            sources, others_follow = self._own_sources(), wanted != self.gradient_sets[-1]
            with self._averaged() as means:
                found = torch.autograd.grad(
                    outputs, sources, grads, retain_graph=others_follow, allow_unused=True
                )
            return found if means is None else [*found[: len(self._wanted)], *means.finish()]

    @contextmanager
    def _averaged(self) -> Iterator[GradientMeans | None]:
        """Within it, gradients of weights are averaged as they come."""
        if self._sums is None:
            yield None
            return
        means = GradientMeans(self.trained, self._sums, self._mesh)
        twins = [self.weights.twins[i] for i in self._reached]
        hooks = [twin.register_hook(partial(means.on_grad, i)) for i, twin in enumerate(twins)]
        try:
            yield means
        finally:
            for hook in hooks:
                hook.remove()

    def run(self) -> None:
        self.forward()
        for wanted in self.gradient_sets:
            self.backward(wanted)

    def forget(self) -> None:
        """Lets go of what the last run keeps; autograd will know nothing of it."""
        self.out, self.outputs = None, []
        self.inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        self.weights = StaticWeights(self._module)

    def find_sources(self, usual: OutputNumbers | None) -> None:
        """Looks, after a forward pass, where gradients come from and go to.

        Those of the outputs ``usual`` are expected to come together.
        """
        found = {i: leaves_under(out) for i, out in enumerate(self.outputs) if out.requires_grad}
        leaves = {key for each in found.values() for key in each}
        wanted = [place for place, own in enumerate(self.inputs) if id(own) in leaves]
        twins = enumerate(self.weights.twins)
        reached = [place for place, twin in twins if id(twin) in leaves]
        if [x.requires_grad for x in self.inputs] != self._wants:
            raise CannotReplayError("it decides that an argument gets gradients")
        if len(leaves) > len(wanted) + len(reached):
            raise CannotReplayError("a tensor gets gradients that is no weight of the module")
        self._wanted, self._reached = wanted, reached
        self.reach = {i: [id(s) in each for s in self._own_sources()] for i, each in found.items()}
        self.grads = {place: torch.ones_like(self.outputs[place]) for place in found}
        every = OutputNumbers(found)
        sets = [usual, every] if usual and usual < every else [every]
        self.gradient_sets = sets if every else []
        self.saved = saved_under(self.outputs)

    def _own_sources(self) -> list[Tensor]:
        return self.sources(self.inputs, self.weights.twins)

    def sources(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``inputs`` and ``weights`` that get gradients."""
        return [inputs[i] for i in self._wanted] + [weights[i] for i in self._reached]

    @property
    def trained(self) -> list[Parameter]:
        """The weights that get gradients."""
        return [self.weights.originals[i] for i in self._reached]


def given_tensors(given: Given) -> list[Tensor]:
    """The tensors among arguments, pieces of Slabs included."""
    args, kwargs = given
    if not kwargs and len(args) == 1 and type(args[0]) is Slab:  # as most are
        return [args[0].local]
    return tensors_in(tree_leaves(given, is_leaf=is_slab))


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


class StaticWeights:
    """For each weight of ``module`` one that no other pass has used.

    Autograd brings the gradient of a weight to the stream on which the weight was used first, as
    long as anyone holds that pass; a recording cannot leave its own stream. Nor do hooks that
    weights have for their gradients belong in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = ParameterSlots(module.modules())
        self.originals = self._slots.parameters
        self.twins = [_twin_of(weight) for weight in self.originals]

    def installed(self) -> AbstractContextManager[None]:
        """Within it the module has them in place of its weights."""
        return self._slots.replaced(self.twins)

    def check(self) -> None:
        if any(twin.grad is not None for twin in self.twins):
            raise CannotReplayError("its backward pass adds to gradients of weights by itself")
        pairs = zip(self.originals, self.twins, strict=True)
        if any(weight.data_ptr() != twin.data_ptr() for weight, twin in pairs):
            raise CannotReplayError("it moves weights in memory, as recurrent layers do")


def _twin_of(weight: Parameter) -> Parameter:
    if type(weight) is not Parameter:
        raise CannotReplayError(f"a weight is a {type(weight).__name__}")
    twin = Parameter(weight.detach(), weight.requires_grad)
    twin.__dict__.update(weight.__dict__)
    leave_part(twin)
    return twin


class StaticSeeds:
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

    def refill(self) -> list[int]:
        """Draws for the next replay; the seeds."""
        if self._numbers is None:
            return []
        drawn = torch.randint(NUM_VALUES, self._numbers.shape)
        self._numbers.copy_(drawn, non_blocking=True)  # CUDA reads what is not pinned at once
        return drawn[:, 0].tolist()
