"""Which arguments of a call are Slabs, and how they are split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyperslab.testing.sweep.arguments import can_be_slab, can_be_split, splittable_dims

AXIS = "depth"
"""The axis of the mesh that all splits are over."""


@dataclass(frozen=True)
class Cut:
    """How one tensor is spread: a Slab cut along ``dim``, or whole if that is None."""

    dim: int | None = None
    bounds: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.dim is None:
            return "whole"
        return f"dim {self.dim} at {'-'.join(map(str, self.bounds))}"


@dataclass(frozen=True)
class Placement:
    """How each tensor of a call is spread; None leaves it a plain tensor."""

    kind: str
    """``main``, ``alike``, ``later``, ``every``, ``crossed`` or ``whole``."""
    cuts: tuple[Cut | None, ...]

    @property
    def main_dim(self) -> int | None:
        """The dim along which the first Slab is split."""
        return next(cut.dim for cut in self.cuts if cut)

    def __str__(self) -> str:
        shown = [f"{number}: {cut}" for number, cut in enumerate(self.cuts) if cut]
        return f"{self.kind} ({', '.join(shown)})"


def placements(tensors: Sequence[Tensor]) -> list[Placement]:
    """All that are tried with these tensors among the arguments, each once."""
    found: dict[tuple[Cut | None, ...], Placement] = {}
    for kind, cuts in _candidates(tensors):
        if any(cuts):
            found.setdefault(cuts, Placement(kind, cuts))
    return list(found.values())


def _candidates(tensors: Sequence[Tensor]) -> Iterator[tuple[str, tuple[Cut | None, ...]]]:
    split = [number for number, tensor in enumerate(tensors) if can_be_split(tensor)]
    for number in split:
        kind = "later" if number else "main"
        for dim in splittable_dims(tensors[number]):
            for cut in (_uneven(tensors[number], dim), _with_nothing(tensors[number], dim)):
                yield kind, tuple(cut if i == number else None for i in range(len(tensors)))
    if split:
        main = tensors[split[0]]
        for dim in splittable_dims(main):
            cut = _uneven(main, dim)
            yield (
                "alike",
                tuple(cut if t.shape == main.shape and can_be_slab(t) else None for t in tensors),
            )
            yield "every", tuple(_aligned(t, main, dim, cut) for t in tensors)
            yield "crossed", tuple(_crossed(t, main, dim, cut) for t in tensors)
        yield "whole", tuple(Cut() if i == split[0] else None for i in range(len(tensors)))
        yield "whole", tuple(Cut() if can_be_slab(t) else None for t in tensors)


def _uneven(tensor: Tensor, dim: int) -> Cut:
    extent = tensor.shape[dim]
    return Cut(dim, (0, max(1, extent // 3), extent))


def _with_nothing(tensor: Tensor, dim: int) -> Cut:
    """The first rank has nothing along even dims, the second along odd ones."""
    extent = tensor.shape[dim]
    return Cut(dim, (0, extent if dim % 2 else 0, extent))


def _aligned(tensor: Tensor, main: Tensor, dim: int, cut: Cut) -> Cut | None:
    """The same cut where ``tensor`` broadcasts against ``main`` along ``dim``; else whole."""
    own = dim - main.ndim + tensor.ndim
    if can_be_slab(tensor) and own >= 0 and tensor.shape[own] == main.shape[dim]:
        return Cut(own, cut.bounds)
    return Cut() if can_be_slab(tensor) else None


def _crossed(tensor: Tensor, main: Tensor, dim: int, cut: Cut) -> Cut | None:
    """``main`` along ``dim``, the others each along another of their dims."""
    if tensor is main:
        return cut
    dims = splittable_dims(tensor) if can_be_split(tensor) else []
    others = [d for d in dims if d - tensor.ndim != dim - main.ndim]
    if others:
        return _uneven(tensor, others[-1])
    return Cut() if can_be_slab(tensor) else None
