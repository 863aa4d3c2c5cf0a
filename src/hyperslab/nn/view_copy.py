"""Copies of what other ranks hold, in places where torch gives views."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hyperslab.comm.fetch import fetch
from hyperslab.errors import UnsupportedOp
from hyperslab.layout import Exchange, Layout, plan_recut
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.module_snapshot import version_of
from hyperslab.nn.op import unsupported, writes_in_place
from hyperslab.nn.slab import Slab, check_looks_inside, is_slab
from hyperslab.torch_private import register_container, tree_leaves, tree_map


class _Origin(NamedTuple):
    """The memory that torch's view would share, as it was when it was copied."""

    base: weakref.ref[Tensor]
    version: int
    storage: StorageWeakRef | None
    """That of a tensor of inference mode, whose views do not know their base."""

    @classmethod
    def of(cls, piece: Tensor) -> _Origin:
        base = piece if piece._base is None else piece._base
        base = getattr(base, "shares_with", base)
        storage = StorageWeakRef(piece.untyped_storage()) if piece.is_inference() else None
        return cls(weakref.ref(base), version_of(base), storage)

    @property
    def lives(self) -> bool:
        """Whether there is still a tensor that shows what it holds."""
        return self.base() is not None if self.storage is None else not self.storage.expired()

    @property
    def was_written(self) -> bool:
        base = self.base()
        return base is not None and version_of(base) != self.version


WRITTEN = (
    "it writes into a copy of what other ranks hold, where torch writes through a view into the "
    "tensor it was taken from: assign to that tensor, as in x[index] = value, or clone() the part "
    "first"
)


@dataclass(frozen=True, eq=False, repr=False)
class ViewCopy(Slab):
    """A Slab that is a view of another tensor in torch and a copy here, as data had to move.

    What is written into a view shows in the tensor it was taken from, and the other way round. A
    copy cannot do that, so it refuses: to be written into while that tensor lives, and to be read
    once that tensor was written into.
    """

    origins: tuple[_Origin, ...] = ()

    @property  # type: ignore[misc]  # a dataclass field of Slab
    def local(self) -> Tensor:
        """This rank's piece, if it still is what torch's view would show."""
        if any(origin.was_written for origin in self.origins):
            raise UnsupportedOp(
                f"a part of {self.layout.describe()} was copied from other ranks, where torch has "
                "a view, and the tensor it was taken from has been written into since: take the "
                "part again, or take it after the last write"
            )
        return self._piece

    @local.setter
    def local(self, piece: Tensor) -> None:
        self.__dict__["local"] = piece

    @property
    def _piece(self) -> Tensor:
        piece: Tensor = self.__dict__["local"]
        return piece

    @staticmethod
    def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs), is_leaf=is_slab)
        copies = [leaf for leaf in leaves if isinstance(leaf, ViewCopy)]
        versions = [version_of(copy.local) for copy in copies]
        out = dispatch(function, args, kwargs)
        for copy, version in zip(copies, versions, strict=True):
            uncounted = copy._piece.is_inference() and bool(args) and args[0] is copy
            written = version_of(copy._piece) != version or (
                uncounted and writes_in_place(function, kwargs)
            )
            if written and any(origin.lives for origin in copy.origins):
                raise unsupported(function, copy, WRITTEN)
        return tree_map(lambda leaf: _marked(leaf, copies), out, is_leaf=is_slab)

    def viewed(self, local: Tensor, layout: Layout, *, is_part: bool = False) -> Slab:
        return ViewCopy(local, layout, self.mesh, True, True, self.origins)

    def __reduce__(self) -> tuple[type[Slab], tuple[object, ...]]:
        return Slab, (self.local, self.layout, self.mesh)


def _marked(leaf: Any, copies: list[ViewCopy]) -> Any:
    """``leaf``, a result of ``copies``, as a copy like them if it is a view of one of them."""
    if not isinstance(leaf, Slab) or isinstance(leaf, ViewCopy):
        return leaf
    viewed = [copy for copy in copies if _memory(copy._piece) == _memory(leaf.local)]
    origins = tuple(origin for copy in viewed for origin in copy.origins)
    return ViewCopy(leaf.local, leaf.layout, leaf.mesh, True, True, origins) if viewed else leaf


def _memory(piece: Tensor) -> int:
    return int(piece.untyped_storage()._cdata)


def fetch_view(x: Slab, piece: Tensor, exchange: Exchange, layout: Layout) -> Slab:
    """What ``exchange`` brings of ``piece``, which is a view of ``x`` and laid out by ``layout``.

    A view of ``x`` where nothing moves, else a ``ViewCopy``. Collective over the mesh.
    """
    local = fetch(piece, exchange, x.mesh)
    if exchange.idle:
        return x.viewed(local, layout)
    # What autograd takes for a view of the piece could not be written into.
    local = local.clone() if exchange.stays else local
    return as_readable(x, x.with_local(local, layout))


def as_copy(x: Slab, out: Slab) -> Slab:
    """``out``, which may or may not be a view of ``x`` in torch, with memory of its own."""
    shared = _memory(out.local) == _memory(x.local)
    return as_readable(x, out.with_local(out.local.clone()) if shared else out)


def as_readable(x: Slab, out: Slab) -> Slab:
    """``out``, made of ``x``, as a Slab that is not written into while ``x`` lives."""
    return ViewCopy(out.local, out.layout, x.mesh, True, True, _origins(x))


def _origins(x: Slab) -> tuple[_Origin, ...]:
    return (*(x.origins if isinstance(x, ViewCopy) else ()), _Origin.of(x.local))


def recut_view(x: Slab, target: Layout) -> Slab:
    """``recut`` for functions that give views in torch."""
    if x.layout == target:
        return x
    exchange = plan_recut(x.mesh.grid, x.mesh.rank, x.layout, target)
    return fetch_view(x, x.local, exchange, target)


def plain_if_number(x: Slab) -> Slab | Tensor:
    """``x``, or its piece if it has no dims; a copy stays what it is, to refuse what it must."""
    return x if x.layout.shape or isinstance(x, ViewCopy) else x.local


def _flatten(copy: ViewCopy) -> tuple[list[Tensor], tuple[object, ...]]:
    check_looks_inside()
    return [copy.local], (copy.layout, copy.mesh, True, True, copy.origins)


register_container(
    ViewCopy,
    _flatten,
    lambda leaves, context: ViewCopy(*leaves, *context),
    serialized_type_name="hyperslab.ViewCopy",
)
