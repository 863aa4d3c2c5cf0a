"""What is known of a chain of layers before it runs, from a run on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import Box, Route, Window
from hyperslab.nn.depth_first.tile_slab import Tape, TileSlab, unjournaled
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import (
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    fake_tensor_mode,
    tree_leaves,
    untraced,
)


@dataclass(frozen=True)
class Survey:
    """What a chain makes of an input of one layout and dtype."""

    route: Route
    dtype: torch.dtype
    memory_format: torch.memory_format
    reaches: tuple[bool, ...]
    """Whether the input, and then each of the weights, gets a gradient from the output."""


class Weights:
    """The parameters of a chain's modules, which can stand aside for others, and their mode."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        named = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items()]
        found = {id(p): p for _, _, p in named if p is not None}
        numbers = {key: number for number, key in enumerate(found)}
        self.parameters = list(found.values())
        self._places = [(t, name, numbers[id(p)]) for t, name, p in named if p is not None]
        self._modes = [(module, module.training) for module in modules]

    @contextmanager
    def replaced(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Within it, modules have ``others`` in the place of their parameters.

        They also are in training or evaluation as they were when this was made.
        """
        kept = [(table, name, table[name]) for table, name, _ in self._places]
        modes = [(module, module.training) for module, _ in self._modes]
        try:
            for table, name, number in self._places:
                table[name] = others[number]  # type: ignore[assignment]
            _set_modes(self._modes)
            yield
        finally:
            for table, name, parameter in kept:
                table[name] = parameter
            _set_modes(modes)


def traits(
    modules: Sequence[nn.Module], parameters: Sequence[Tensor], *, modes: bool = True
) -> tuple[object, ...]:
    """What the modules do, as far as their attributes tell, and which gradients there are.

    Without ``modes``, whether they train does not count.
    """
    plain = (int, float, str, tuple, torch.dtype)
    attributes = [
        (
            type(module),
            *(
                (k, v)
                for k, v in module.__dict__.items()
                if isinstance(v, plain) and (modes or k != "training")
            ),
        )
        for module in modules
    ]
    return *attributes, *((p.shape, p.dtype, p.requires_grad) for p in parameters)


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def survey(run: Callable[[TileSlab], Any], x: Slab, weights: Weights) -> Survey:
    """Follows the whole of ``x`` through ``run``, on tensors that have no values.

    Raises what cannot be computed tile by tile, on all ranks alike and before any message.
    """
    leaves = [nn.Parameter(p.detach(), p.requires_grad) for p in weights.parameters]
    with ExitStack() as stack:
        for mode in (*_unheard(), weights.replaced(leaves)):
            stack.enter_context(mode)
        for watch in (fake_tensor_mode(), _Guard()):  # type: ignore[no-untyped-call]
            stack.enter_context(watch)
        source = _valueless(x)
        given = source.clone()  # not a leaf, which nothing can be written into
        before, tape = given._version, Tape(x.layout)
        try:
            out = run(TileSlab(given, Box.whole(x.shape), x.layout, x.mesh, tape))
        except DataDependentOutputException as error:
            raise UnsupportedOp(
                "what a depth-first chain does cannot depend on the values of tensors, as by if, "
                f"item() or tolist(): {error}"
            ) from None
        if given._version != before:
            raise UnsupportedOp(
                "a depth-first chain cannot write into its own input, parts of which it needs "
                "again: use inplace=False in its first layer"
            )
        _check_result(out)
        reached = _leaves_of(out.local)
        _check_known(reached, [source, *leaves])
        route = Route(tuple(tape.steps), out.step, out.whole)
        _check_used(route)
        reaches = tuple(leaf in reached for leaf in (source, *leaves))
        return Survey(route, out.dtype, memory_format_of(out.local), reaches)


def _unheard() -> tuple[AbstractContextManager[Any], ...]:
    """Modes in which a graph is made that nothing around it knows of."""
    keep = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    return untraced(), torch.inference_mode(False), torch.enable_grad(), keep, unjournaled()


def _valueless(x: Slab) -> Tensor:
    """The whole of ``x``, in the current mode."""
    kind: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "requires_grad": x.requires_grad}
    return torch.empty(x.shape, memory_format=memory_format_of(x.local), **kind)


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
            if argument.is_write and any(map(_is_real, tree_leaves(value))):
                raise UnsupportedOp(
                    f"{func} writes into a tensor of the module, which would happen once for every "
                    "tile of a depth-first chain (BatchNorm in training does so): name modules "
                    "without it in depth_first"
                )
        return func(*args, **kwargs)


class _Guard(ReadOnly):
    """Refuses what would be done once for every tile, or differently in each."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedOp(
                f"{func} draws random numbers, which would differ from tile to tile of a "
                "depth-first chain: name modules without it in depth_first"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _check_result(out: Any) -> None:
    if not isinstance(out, TileSlab):
        raise UnsupportedOp(
            f"a depth-first chain gives one tensor, made of its input, and this one gives a "
            f"{type(out).__name__}: name modules that give one in depth_first"
        )


def _check_used(route: Route) -> None:
    """Windows are computed as far as somebody wants them, and of these nobody would say how far."""
    needs = route.needs(Box.whole(route.output.shape))
    for step, box in zip(route.steps, needs, strict=True):
        if box is None and any(isinstance(window, Window) for window in step.windows):
            raise UnsupportedOp(
                f"a depth-first chain computes what its output is made of, and this one also a "
                f"tensor of shape {step.shape} that is not used for it: leave that out, or name "
                "modules without it in depth_first"
            )


def _leaves_of(out: Tensor) -> set[Tensor]:
    """The leaves of the graph of ``out``, which get gradients from it."""
    found: set[Tensor] = set()
    seen, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.add(leaf)
        todo += [before for before, _ in node.next_functions]
    return found


def _check_known(reached: set[Tensor], known: Sequence[Tensor]) -> None:
    if unknown := reached.difference(known):
        shapes = ", ".join(sorted(str(tuple(leaf.shape)) for leaf in unknown))
        raise UnsupportedOp(
            "a depth-first chain computes gradients of its input and of the parameters of its "
            f"modules alone, and this one uses others, of shape {shapes}: name a module that "
            "contains them too in depth_first"
        )
