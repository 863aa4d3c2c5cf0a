"""Which of the tensors that a pass returned are used for a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hyperslab.nn.outputs import map_tensors, tensors_of
from hyperslab.nn.replay.own_pass import Places


def note_used(out: Any, note: Callable[[Places], None]) -> Any:
    """``out``, with copies in it: ``note`` gets the places of those that get gradients.

    A hook of each tensor would not tell: one that others are computed from always gets a gradient.
    """
    outputs = tensors_of(out)
    places = [place for place, tensor in enumerate(outputs) if tensor.requires_grad]
    if len(places) < 2:  # then it gets one, or there is no backward pass
        return out
    given = [outputs[place] for place in places]
    copies = _Note.apply(note, places, *given)  # type: ignore[no-untyped-call]
    rest = iter({**dict(enumerate(outputs)), **dict(zip(places, copies, strict=True))}.values())
    return map_tensors(lambda _: next(rest), out)


class _Note(Function):
    @staticmethod
    def forward(
        ctx: Any, note: Callable[[Places], None], places: list[int], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.note, ctx.places = note, places
        return tuple([output.clone() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.places, grads, strict=True)
        ctx.note(Places(place for place, grad in pairs if grad is not None))
        return None, None, *grads
