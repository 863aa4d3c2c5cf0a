"""Convolutions and activations that wait for what follows, to be computed in one pass over memory.

Only the very next function of Slabs can be what they wait for: a pool, or after a convolution an
activation. Before any other function runs they are computed, so that nothing comes in between that
would change their results.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.act_pool import activate
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.layout import Layout
from hyperslab.nn import dispatch
from hyperslab.nn.slab import Slab, flatten

POOLS: set[Callable[..., Any]] = set()
"""The functions that take pieces as they are before their activation."""
ACTIVATIONS: set[Callable[..., Any]] = set()
"""The functions that a convolution waits for."""


class Source(Protocol):
    """What a piece is made of."""

    def plain(self) -> Tensor:
        """The piece before its activation."""

    def activated(self, slope: float) -> Tensor:
        """The piece with its negative elements multiplied by ``slope``."""


class Made:
    """A piece that exists and is yet to be activated."""

    def __init__(self, piece: Tensor, *, in_place: bool) -> None:
        self.piece, self.in_place, self.versions = piece, in_place, _Versions([piece])

    def plain(self) -> Tensor:
        self.versions.check()
        return self.piece

    def activated(self, slope: float) -> Tensor:
        self.versions.check()
        return activate(self.piece, slope, in_place=self.in_place)


class Convolved:
    """A convolution that has not been computed; ``run`` does it and multiplies by a slope.

    ``run_pool`` does a pool too, or returns None where it cannot.
    """

    def __init__(
        self,
        run: Callable[[float], Tensor],
        run_pool: Callable[[float, Pool], Tensor | None],
        operands: Sequence[Tensor],
    ) -> None:
        self.run, self.run_pool, self.versions = run, run_pool, _Versions(operands)
        self.made: Tensor | None = None
        self.was_pooled = False

    @property
    def is_used_again(self) -> bool:
        """Whether convolutions like this one were still wanted after they had been pooled."""
        return bool(_used_again) and self._alike in _used_again

    def pooled(self, slope: float, pool: Pool) -> Tensor | None:
        """The pool of the activated piece, where one kernel does all."""
        if self.made is not None or self.is_used_again:
            return None
        self.versions.check()
        out = self.run_pool(slope, pool)
        self.was_pooled = out is not None
        return out

    def plain(self) -> Tensor:
        if self.made is None:
            self.versions.check()
            self.made = self.run(1.0)
        return self.made

    def activated(self, slope: float) -> Tensor:
        if self.was_pooled and (alike := self._alike):
            _used_again.add(alike)
        if slope == 1 or self.made is not None:
            return activate(self.plain(), slope)
        self.versions.check()
        return self.run(slope)

    @property
    def _alike(self) -> tuple[object, ...] | None:
        """What convolutions have in common that are taken to be used alike.

        None while hooks see the tensors that autograd saves: a checkpoint's second run must save
        as many as its first, whatever was learned between them.
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        return tuple((tensor.shape, tensor.dtype) for tensor, _ in self.versions.seen)


_used_again: set[tuple[object, ...]] = set()
"""Convolutions that one kernel pooled and that were wanted themselves too, as by skip connections.

They were computed twice; from the next pass on those like them are computed once, and then pooled.
When a Slab is pooled nobody can tell that it is used again: whoever calls the pool holds it.
"""


class _Versions:
    """How often tensors have been written into."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.seen = [(t, t._version) for t in tensors]

    def check(self) -> None:
        for tensor, version in self.seen:
            if tensor._version != version:
                raise UnsupportedOp(
                    "a convolution or an activation was to be computed together with what follows "
                    "it, and meanwhile a tensor it needs was written into, past its Slab: write "
                    "into it before, or after the next function of Slabs"
                )


@dataclass(frozen=True, eq=False, repr=False)
class Deferred(Slab):
    """A Slab whose piece is not computed until somebody asks for it."""

    source: Source | None = None
    """None once the piece is there."""
    slope: float = 1.0
    grad_mode: bool = True
    """Whether autograd watched the function that is to be computed."""

    @property  # type: ignore[misc]  # a dataclass field of Slab
    def local(self) -> Tensor:
        """This rank's piece, computed now if it is not there yet."""
        if self.source is not None:
            with torch.set_grad_enabled(self.grad_mode):
                piece = self.source.activated(self.slope)
            self.__dict__.update(local=piece, source=None)
            object.__setattr__(self, "__class__", Slab)  # from now on as good as any
        found: Tensor = self.__dict__["local"]
        return found

    @local.setter
    def local(self, piece: Tensor | None) -> None:
        self.__dict__["local"] = piece

    def can_wait_for(self, function: Callable[..., Any]) -> bool:
        if torch.is_grad_enabled() != self.grad_mode:
            return False
        is_plain = self.slope == 1 and isinstance(self.source, Convolved)
        return function in POOLS or (is_plain and function in ACTIVATIONS)

    def __repr__(self) -> str:
        if self.source is None:
            return super().__repr__()
        return f"Slab({self.layout.describe()}; rank {self.mesh.rank} has not computed its piece)"

    def __reduce__(self) -> tuple[type[Slab], tuple[object, ...]]:
        return Slab, (self.local, self.layout, self.mesh)


def defer_conv(x: Slab, layout: Layout, source: Convolved) -> Slab:
    """The output of a convolution of ``x`` that waits."""
    return _wait(Deferred(None, layout, x.mesh, source=source))  # type: ignore[arg-type]


MANY_WAITS = 4
"""So often an activation waits for a pool; if none came, those of this shape wait no more."""
MOST_SHAPES = 1024
_waits: Counter[tuple[torch.Size, torch.dtype]] = Counter()


def waits_in_vain(piece: Tensor) -> bool:
    """Whether no pool ever followed an activation of pieces like this."""
    return _waits[piece.shape, piece.dtype] >= MANY_WAITS


def defer_activation(x: Slab, slope: float, *, in_place: bool) -> Slab:
    """``x`` with an activation that waits, as does ``x`` itself where it is a convolution's."""
    found = x.source if isinstance(x, Deferred) else None
    if found is None:
        if len(_waits) == MOST_SHAPES:
            _waits.clear()
        _waits[x.local.shape, x.local.dtype] += 1
    source = found or Made(x.local, in_place=in_place)
    if not in_place:
        return _wait(Deferred(None, x.layout, x.mesh, source=source, slope=slope))  # type: ignore[arg-type]
    object.__setattr__(x, "__class__", Deferred)  # torch returns the tensor it wrote into
    x.__dict__.update(source=source, slope=slope, grad_mode=torch.is_grad_enabled())
    return x if found else _wait(x)


def _wait(x: Any) -> Slab:
    x.__dict__["grad_mode"] = torch.is_grad_enabled()
    found = weakref.ref(x)

    def settle(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Has the piece computed, unless ``function`` will; whether to ask again."""
        x = found()
        if x is None or x.source is None:
            return False
        if args and args[0] is x and x.can_wait_for(function):
            return True
        return x.local is None

    dispatch.before_next(settle)
    return x  # type: ignore[no-any-return]


def unactivated(x: Slab) -> tuple[Tensor, float]:
    """A piece and the slope of the activation that is yet to be applied to it, or 1.

    To be called where ``x`` waited for the function that runs: autograd watches it as it did.
    """
    if not isinstance(x, Deferred) or x.source is None:
        return x.local, 1.0
    if isinstance(x.source, Made) and x.source.in_place and _is_shared(x.source.piece):
        return x.local, 1.0
    if isinstance(x.source, Convolved) and x.source.is_used_again:
        return x.local, 1.0
    piece = x.source.plain()
    _waits[piece.shape, piece.dtype] = -sys.maxsize  # it was worth while
    return piece, x.slope


def pooled(x: Slab, pool: Pool) -> Tensor | None:
    """The pool of a piece, where a convolution and perhaps an activation waited for it."""
    if not isinstance(x, Deferred) or not isinstance(x.source, Convolved):
        return None
    return x.source.pooled(x.slope, pool)


def _is_shared(piece: Tensor) -> bool:
    """Whether other tensors show the same memory, and would show that it was not written into."""
    ours = 2  # the tensor and the storage object here
    return bool(torch._C._storage_Use_Count(piece.untyped_storage()._cdata) > ours)


register_pytree_node(
    Deferred,
    flatten,
    lambda leaves, context: Slab(*leaves, *context),
    serialized_type_name="hyperslab.Deferred",
)
