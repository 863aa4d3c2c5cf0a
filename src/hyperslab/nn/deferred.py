"""Deferred convolutions and activations, to be computed together with what follows.

Only the very next function can be what they wait for: a pool, or after a convolution an activation.
Before any other function runs they are materialised, so that nothing comes in between that would
change their results. A pool of such a one waits too, until the next function: if somebody holds its
input by then, whose gradient may be asked for, that is computed first, and the pool of it. What
waits is a Slab; where a module runs on plain tensors, a
``DeferredTensor`` stands for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import UnsupportedOp
from hyperslab.kernels.act_pool import activate
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.kernels.memory_format import channels_last, memory_format_of
from hyperslab.layout import Layout
from hyperslab.nn import dispatch
from hyperslab.nn.slab import Slab, flatten
from hyperslab.torch_private import (
    num_storage_owners,
    past_subclasses,
    past_torch_functions,
    register_container,
    swap_contents,
    tree_leaves,
    tree_map_only,
)

POOLS: set[Callable[..., Any]] = set()
"""The functions that take pieces as they are before their activation."""
ACTIVATIONS: set[Callable[..., Any]] = set()
"""The functions that a convolution waits for."""


class Source(Protocol):
    """What a piece is made of."""

    versions: _Versions

    def like(self, shape: Sequence[int]) -> Tensor:
        """A tensor on the meta device that has that shape and lies in memory as the piece will."""

    def plain(self) -> Tensor:
        """The piece before its activation."""

    def activated(self, slope: float) -> Tensor:
        """The piece with its negative elements multiplied by ``slope``."""

    def compute(self, slope: float) -> Tensor:
        """As ``activated``, with nothing that others have computed or will need."""

    def on(self, operands: Sequence[Tensor]) -> Source:
        """The same of other tensors than ``versions.tensors``."""


class Made:
    """A piece that exists and is yet to be activated."""

    def __init__(self, piece: Tensor, *, in_place: bool) -> None:
        self.piece, self.in_place, self.versions = piece, in_place, _Versions([piece])

    def like(self, shape: Sequence[int]) -> Tensor:
        return torch.empty_like(self.piece, device="meta")

    def plain(self) -> Tensor:
        self.versions.check()
        return self.piece

    def activated(self, slope: float) -> Tensor:
        self.versions.check()
        return activate(self.piece, slope, in_place=self.in_place)

    compute = activated

    def on(self, operands: Sequence[Tensor]) -> Made:
        return Made(*operands, in_place=False)


class Convolved:
    """A convolution that has not been computed; ``run`` does it and multiplies by a slope.

    ``run_pool`` does a pool too, or returns None where it cannot. Both take the operands last.
    ``run_split_pool`` does a pool that reads what other ranks hold. Then ``run`` sends messages,
    and must do so on all ranks or on none, whoever still holds the output there.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        run_pool: Callable[..., Tensor | None],
        operands: Sequence[Tensor],
        run_split_pool: Callable[[float, Pool, Any], Slab | None] | None = None,
    ) -> None:
        self.run, self.run_pool, self.versions = run, run_pool, _Versions(operands)
        self.run_split_pool = run_split_pool
        self.made: Tensor | None = None

    def like(self, shape: Sequence[int]) -> Tensor:
        dtype = self.versions.tensors[1].dtype
        last = channels_last(len(shape))
        return torch.empty(tuple(shape), dtype=dtype, device="meta", memory_format=last)

    def pooled(self, slope: float, pool: Pool) -> Tensor | None:
        """The pool of the activated piece, where one kernel does all."""
        if self.made is not None:
            return None
        self.versions.check()
        return self.run_pool(slope, pool, *self.versions.tensors)

    def plain(self) -> Tensor:
        if self.made is None:
            self.versions.check()
            self.made = self.run(1.0, *self.versions.tensors)
        return self.made

    def activated(self, slope: float) -> Tensor:
        if slope == 1 or self.made is not None:
            return activate(self.plain(), slope)
        return self.compute(slope)

    def compute(self, slope: float) -> Tensor:
        self.versions.check()
        return self.run(slope, *self.versions.tensors)

    def on(self, operands: Sequence[Tensor]) -> Convolved:
        return Convolved(self.run, self.run_pool, operands, self.run_split_pool)

    @property
    def sends(self) -> bool:
        """Whether ranks send messages to compute it."""
        return self.run_split_pool is not None


class Pooled:
    """A pool of a Slab that waited for it; ``run`` computes the pool of a Slab.

    It waits to learn whether somebody holds that Slab, or the tensor that stands for it.
    """

    def __init__(self, run: Callable[[Slab], Tensor], x: Deferred) -> None:
        assert x.source is not None
        self.run, self.input, self.versions = run, weakref.ref(x), x.source.versions
        self.kept: Slab | None = None
        """The Slab, once it is computed because somebody holds it."""
        x.__dict__["pool"] = weakref.ref(self)
        self._source, self._place, self._slope = x.source, (x.layout, x.mesh), x.slope

    def like(self, shape: Sequence[int]) -> Tensor:
        like = self._source.like(self._place[0].shape)
        kept = memory_format_of(like)
        return torch.empty(tuple(shape), dtype=like.dtype, device="meta", memory_format=kept)

    def activated(self, slope: float) -> Tensor:
        x = self.input()
        if self.kept is None and x is not None:
            x.materialise()
        kept, self.kept = self.kept, None
        return self.compute(slope) if kept is None else self.run(kept)

    def plain(self) -> Tensor:
        return self.activated(1.0)

    def compute(self, slope: float) -> Tensor:
        return self.run(Deferred(*self._place, self._source, self._slope))

    def on(self, operands: Sequence[Tensor]) -> Pooled:
        return Pooled(self.run, Deferred(*self._place, self._source.on(operands), self._slope))


class _Versions:
    """How often tensors have been written into."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.seen = [(t, t._version) for t in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self.seen]

    def check(self) -> None:
        for tensor, version in self.seen:
            if tensor._version != version:
                raise UnsupportedOp(
                    "a convolution or an activation was to be computed together with what follows "
                    "it, and meanwhile a tensor it needs was written into, where hyperslab cannot "
                    "see it: write into it before, or after the next function"
                )


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Deferred(Slab):
    """A Slab whose piece is not computed until somebody asks for it."""

    source: Source | None = None
    """None once the piece is there."""
    slope: float = 1.0
    grad_mode: bool = True
    """Whether autograd watched the function that is to be computed."""
    stream: torch.cuda.Stream | None = None
    """Where its operands are ready, on a GPU."""
    tensor: weakref.ref[DeferredTensor] | None = None
    """The plain tensor that stands for it, if one does."""
    pool: weakref.ref[Pooled] | None = None
    """What it waited for, if that waits now."""
    is_taken: bool = False
    """Whether something else was made of its source, which sends messages.

    It is then computed when somebody uses it, which all ranks do at the same place.
    """

    def __init__(self, layout: Layout, mesh: Mesh, source: Source, slope: float = 1.0) -> None:
        """As a dataclass does it, in a fraction of the time."""
        fields = self.__dict__
        fields["layout"], fields["mesh"], fields["source"], fields["slope"] = (
            layout,
            mesh,
            source,
            slope,
        )

    @property  # type: ignore[misc]  # a dataclass field of Slab
    def local(self) -> Tensor:
        """This rank's piece, computed now if it is not there yet."""
        tensor = None if self.tensor is None else self.tensor()
        if tensor is not None and not tensor.materialise():
            return tensor
        if self.source is not None:
            with torch.set_grad_enabled(self.grad_mode), _on_stream(self.stream):
                piece = self.source.activated(self.slope)
            self.__dict__.update(local=piece, source=None)
            self.keep_for_pool(self)
            object.__setattr__(self, "__class__", Slab)  # from now on as good as any
        found: Tensor = self.__dict__["local"]
        return found

    @local.setter
    def local(self, piece: Tensor | None) -> None:
        self.__dict__["local"] = piece

    def materialise(self) -> None:
        """Computes the piece; what stands for this Slab becomes an ordinary tensor."""
        tensor = None if self.tensor is None else self.tensor()
        if tensor is None:
            self.local  # noqa: B018
        else:
            tensor.materialise()

    def keep_for_pool(self, x: Slab) -> None:
        """Has the pool that it waited for be one of ``x``."""
        if self.pool is not None and (pool := self.pool()) is not None:
            pool.kept = x

    def can_wait_for(self, function: Callable[..., Any]) -> bool:
        if isinstance(self.source, Pooled):
            return False
        if torch.is_grad_enabled() != self.grad_mode or _stream(self.mesh.device) != self.stream:
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
    return _wait(Deferred(layout, x.mesh, source))


def defer_pool(x: Slab, layout: Layout, run: Callable[[Slab], Tensor]) -> Slab | None:
    """The pool of ``x``, which waits; None unless ``x`` waited and may be asked for a gradient.

    ``run`` computes it of ``x`` as it is then.
    """
    if not isinstance(x, Deferred) or x.source is None or not torch.is_grad_enabled():
        return None
    if not any(t.requires_grad for t in x.source.versions.tensors):
        return None
    return _wait(Deferred(layout, x.mesh, Pooled(run, x)))


def defer_activation(x: Slab, slope: float, *, in_place: bool) -> Slab:
    """``x`` with an activation that waits, as does ``x`` itself where it is a convolution's."""
    found = x.source if isinstance(x, Deferred) else None
    source = found or Made(x.local, in_place=in_place)
    if not in_place:
        _take(x)
        return _wait(Deferred(x.layout, x.mesh, source, slope))
    object.__setattr__(x, "__class__", Deferred)  # torch returns the tensor it wrote into
    x.__dict__.update(source=source, slope=slope, grad_mode=torch.is_grad_enabled())
    return x if found else _wait(x)


def _take(x: Slab) -> None:
    if isinstance(x, Deferred) and isinstance(x.source, Convolved) and x.source.sends:
        x.__dict__["is_taken"] = True


def _wait(x: Any) -> Slab:
    x.__dict__.update(grad_mode=torch.is_grad_enabled(), stream=_stream(x.mesh.device))
    sends = isinstance(x.source, Convolved) and x.source.sends
    found = (lambda held=x: held) if sends else weakref.ref(x)  # all ranks have it, or none

    def wait(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Materialises the Slab unless ``function`` consumes it; whether it waits still."""
        x = found()
        if x is None or x.source is None or x.is_taken:
            return False
        first: Any = args[0] if args else None
        if type(first) is DeferredTensor:
            first = first.slab
        if first is x and x.can_wait_for(function):
            return True
        x.materialise()
        return False

    dispatch.before_next(wait)
    return x  # type: ignore[no-any-return]


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within it, work is given to ``stream``; after it, the current stream waits for that work."""
    now = None if stream is None else torch.cuda.current_stream(stream.device)
    if now is None or now == stream:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    now.wait_stream(stream)  # type: ignore[arg-type]


def unactivated(x: Slab) -> tuple[Tensor, float]:
    """A piece and the slope of the activation that is yet to be applied to it, or 1.

    To be called where ``x`` waited for the function that runs: autograd watches it as it did.
    """
    if not isinstance(x, Deferred) or x.source is None:
        return x.local, 1.0
    if isinstance(x.source, Made) and x.source.in_place and _is_shared(x.source.piece):
        return x.local, 1.0
    return x.source.plain(), x.slope


_OWN_ATTRIBUTES = {"slab", "elements"}


class DeferredTensor(Tensor):
    """A tensor on one rank whose elements are computed when it is first used.

    Before a function of Python runs, the object itself becomes an ordinary tensor. What comes past
    Python, as operators of C++ extensions do, is given the elements, and has the right gradient.
    """

    slab: Deferred
    elements: Tensor | None
    """Those of a tensor that cannot become an ordinary one, as it is held past Python."""

    @staticmethod
    def __new__(cls: type[DeferredTensor], slab: Deferred) -> DeferredTensor:
        assert slab.source is not None
        like = slab.source.like(slab.layout.shape)
        tensor: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=slab.mesh.device
        )
        tensor.slab, tensor.elements = slab, None
        slab.__dict__["tensor"] = weakref.ref(tensor)
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        left = [t for t in tree_leaves((args, kwargs)) if type(t) is DeferredTensor]
        have_become = [tensor.materialise() for tensor in left]
        if all(have_become):
            return func(*args, **kwargs)
        with past_subclasses():
            return func(*args, **kwargs)

    def materialise(self) -> bool:
        """Makes this an ordinary tensor, if nothing holds it past Python."""
        slab = self.slab
        with past_torch_functions():
            if self.elements is not None or self._use_count() > 1:  # type: ignore[attr-defined]
                self.read()
                slab.keep_for_pool(Slab(self, slab.layout, slab.mesh))
                return False
            slab.__dict__["tensor"] = None
            source = slab.source
            is_shared = source is None or getattr(source, "made", None) is not None
            piece = slab.local.view_as(slab.local) if is_shared else slab.local
            if isinstance(source, Convolved) and source.made is piece:
                source.made = self
            slab.__dict__["local"] = self
            users = {name: self.__dict__[name] for name in self.__dict__.keys() - _OWN_ATTRIBUTES}
            swap_contents(self, piece)
            self.__dict__.update(users)
        return True

    def read(self) -> Tensor:
        """The elements, outside of any graph."""
        if self.elements is None:
            source, slab = self.slab.source, self.slab
            with torch.no_grad(), _on_stream(slab.stream):
                found = slab.local if source is None else source.compute(slab.slope)
            self.elements = found.detach()
        return self.elements

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given: dict[int, DeferredTensor] = {}

        def elements(tensor: DeferredTensor) -> Tensor:
            given[id(tensor.read())] = tensor
            return tensor.read()

        args, kwargs = tree_map_only(DeferredTensor, elements, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda leaf: given.get(id(leaf), leaf), out)


class _Later(Function):
    """Gives a tensor without elements its place in the graph."""

    @staticmethod
    def forward(ctx: Any, slabs: list[Deferred], *operands: Tensor) -> Tensor:
        (ctx.slab,) = slabs
        ctx.source = ctx.slab.source
        return DeferredTensor(ctx.slab)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Runs where the elements were read past Python: else the tensor has another graph."""
        wants = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            # Of views, so that hooks of the operands themselves do not see a part of the gradient.
            operands = [t.view_as(t) for t in ctx.source.versions.tensors]
            out = ctx.source.on(operands).compute(ctx.slab.slope)
        wanted = [t for t, want in zip(operands, wants, strict=True) if want]
        again = torch.is_grad_enabled()
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
        return None, *(next(found) if want else None for want in wants)


def defer_tensor(slab: Deferred) -> Tensor:
    """A plain tensor that stands for ``slab``, which waits."""
    assert slab.source is not None
    out: Tensor = _Later.apply([slab], *slab.source.versions.tensors)  # type: ignore[no-untyped-call]
    return out


def pooled(x: Slab, pool: Pool) -> Tensor | None:
    """The pool of a piece, where a convolution and perhaps an activation waited for it."""
    if not isinstance(x, Deferred) or not isinstance(x.source, Convolved):
        return None
    return x.source.pooled(x.slope, pool)


def split_pooled(x: Slab, pool: Pool, windows: Sequence[Any]) -> Slab | None:
    """The pool, with ``windows``, of a convolution that waited for it, exchanged for at once."""
    source = x.source if isinstance(x, Deferred) else None
    if (
        not isinstance(source, Convolved)
        or source.run_split_pool is None
        or source.made is not None
    ):
        return None
    source.versions.check()
    out = source.run_split_pool(x.slope, pool, windows)
    if out is not None:
        _take(x)
    return out


def _is_shared(piece: Tensor) -> bool:
    """Whether other tensors show the same memory, and would show that it was not written into."""
    ours = 2  # the tensor and the storage object here
    return num_storage_owners(piece.untyped_storage()) > ours


register_container(
    Deferred,
    flatten,
    lambda leaves, context: Slab(*leaves, *context),
    serialized_type_name="hyperslab.Deferred",
)
