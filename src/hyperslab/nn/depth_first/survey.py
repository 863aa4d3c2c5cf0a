"""What is known of a chain of layers before it runs, from a run on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import Box, Route, Window
from hyperslab.nn.depth_first.tile_slab import Tape, TileSlab
from hyperslab.nn.outputs import leaves_under
from hyperslab.nn.slab import Slab
from hyperslab.nn.trial_run import ReadOnly, trial_run, without_values
from hyperslab.torch_private import DataDependentOutputException


@dataclass(frozen=True)
class Survey:
    """What a chain makes of an input of one layout and dtype."""

    route: Route
    dtype: torch.dtype
    memory_format: torch.memory_format
    reaches: tuple[bool, ...]
    """Whether the input, and then each of the weights, gets a gradient from the output."""


def survey(run: Callable[[TileSlab], Any], x: Slab, modules: Sequence[nn.Module]) -> Survey:
    """Follows the whole of ``x`` through ``run``, on tensors that have no values.

    Raises what cannot be computed tile by tile, on all ranks alike and before any message.
    """
    guard = _TileGuard()  # type: ignore[no-untyped-call]
    with trial_run(modules, x.device, guard) as trial:
        source, leaves = without_values(x), trial.leaves
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
        reached = leaves_under(out.local) if out.local.grad_fn else {}
        _check_known(reached, [source, *leaves])
        route = Route(tuple(tape.steps), out.step, out.whole)
        _check_used(route)
        reaches = tuple(id(leaf) in reached for leaf in (source, *leaves))
        return Survey(route, out.dtype, memory_format_of(out.local), reaches)


class _TileGuard(ReadOnly):
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


def _check_known(reached: dict[int, Tensor], known: Sequence[Tensor]) -> None:
    if unknown := reached.keys() - set(map(id, known)):
        shapes = ", ".join(sorted(str(tuple(reached[key].shape)) for key in unknown))
        raise UnsupportedOp(
            "a depth-first chain computes gradients of its input and of the parameters of its "
            f"modules alone, and this one uses others, of shape {shapes}: name a module that "
            "contains them too in depth_first"
        )
