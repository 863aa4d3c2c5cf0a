"""Plain tensors that become Slabs when a Slab is written into them.

As in ``torch.zeros(shape).scatter_(1, labels, 1)``: what the function returns is split as the Slab
is. The plain tensor would have to be whole on every rank, and is not: it cannot be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

from torch import Tensor

from hyperslab.errors import UnsupportedOp
from hyperslab.layout import Box, Layout, Split
from hyperslab.nn.op import unsupported
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import change_class, num_storage_owners


class Adopted(Tensor):
    """A plain tensor that has become a Slab. Every use of it raises."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Never:
        raise UnsupportedOp(
            "a split tensor was written into this plain tensor, which made a Slab of it: use what "
            "the writing function returned, as in out = out.scatter_(1, labels, 1)"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "a plain tensor that has become a Slab"


def write_adopted(
    function: Callable[..., Any],
    target: Tensor,
    others: Sequence[Any],
    write: Callable[[Slab], Slab],
) -> Slab:
    """What ``write`` gives for ``target`` as a Slab, into which ``function`` writes ``others``.

    Refused where somebody else sees the memory of ``target``, who would miss what is written.
    """
    slabs = [other for other in others if isinstance(other, Slab)]
    layout = _layout_for(tuple(target.shape), slabs)
    if layout is None or not _is_sole_owner(target):
        raise unsupported(
            function,
            slabs[0],
            "it would write a split tensor into a plain one, which every rank holds whole: use the "
            "function that does not write in place, or torch.zeros_like of a split tensor",
        )
    mesh = slabs[0].mesh
    piece = target[layout.box(mesh.coords).slices_in(Box.whole(layout.shape))].clone()
    written = write(Slab(piece, layout, mesh))
    target.set_()  # type: ignore[call-overload]  # gives its memory back
    change_class(target, Adopted)
    return written


def _layout_for(shape: tuple[int, ...], slabs: Sequence[Slab]) -> Layout | None:
    """The layout of a tensor of ``shape`` that is split as all of ``slabs`` are, if one is."""
    splits: list[Split | None] = [None] * len(shape)
    for slab in slabs:
        behind = len(shape) - slab.ndim
        for dim in slab.layout.split_dims:
            to = behind + dim
            if to < 0 or shape[to] != slab.layout.shape[dim]:
                return None
            splits[to] = splits[to] or slab.layout.splits[dim]
    axes = [split.axis for split in splits if split]
    return Layout(shape, tuple(splits)) if len(axes) == len(set(axes)) > 0 else None


def _is_sole_owner(target: Tensor) -> bool:
    """Whether nobody but ``target`` itself, outside of any graph, sees its memory."""
    if type(target) is not Tensor or target.requires_grad or target.is_inference():
        return False
    storage = target.untyped_storage()  # a holder too
    return num_storage_owners(storage) == 2 and storage.resizable()
