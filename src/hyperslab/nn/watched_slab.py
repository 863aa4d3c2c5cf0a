"""Slabs that note what is done with them, to tell whether a pass could do without Slabs."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops.random_bits import num_drawn
from hyperslab.kernels import few_channels, fused, tiles
from hyperslab.kernels.torch_conv import avoids_any
from hyperslab.layout import Layout
from hyperslab.nn.deferred import POOLS
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import OPS
from hyperslab.nn.ops.windows.spatial import autocast_dtype
from hyperslab.nn.slab import Slab, flatten, is_slab

POOLED_SHARE = 0.1
"""Fused pools are done without where they read less than this share of what all functions do."""

PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.Size)
"""What holds no Slabs."""

_LIKE_TENSORS = """
    shape ndim dtype device requires_grad is_cuda size dim numel is_floating_point is_complex
    is_contiguous element_size register_hook retain_grad _check_alone __len__ __iter__
"""


class WatchedSlab(Slab):
    """A Slab as a module sees it in a pass that is watched.

    Torch's functions compute with the Slab inside. Whoever asks for what plain tensors do not have
    is noted.
    """

    inner: Slab
    watch: Watch

    def __init__(self, inner: Slab, watch: Watch) -> None:
        self.__dict__.update(inner=inner, watch=watch)

    @staticmethod
    def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tree_flatten((args, kwargs), is_leaf=is_slab)[0]
        watch = next(leaf.watch for leaf in leaves if isinstance(leaf, WatchedSlab))
        return watch.run(function, args, kwargs)

    @property
    def local(self) -> Tensor:
        self._note(sys._getframe(1).f_code)
        return self.inner.local

    @property
    def layout(self) -> Layout:
        self._note(sys._getframe(1).f_code)
        return self.inner.layout

    @property
    def mesh(self) -> Mesh:
        self._note(sys._getframe(1).f_code)
        return self.inner.mesh

    @property
    def is_view(self) -> bool:
        self._note(None)
        return self.inner.is_view

    @property
    def is_part(self) -> bool:
        self._note(None)
        return self.inner.is_part

    def _note(self, reader: object) -> None:
        if reader not in _AS_TENSORS_DO:
            self.watch.need("it asks a Slab for its piece, its layout or its mesh")

    def on(self, mesh: Mesh) -> Slab:
        return self.inner.on(self.mesh if mesh is self.inner.mesh else mesh)

    def settle(self) -> None:
        """Makes this a Slab like any other."""
        inner = self.inner
        self.__dict__.clear()
        self.__dict__.update(
            local=inner.local,
            layout=inner.layout,
            mesh=inner.mesh,
            is_view=inner.is_view,
            is_part=inner.is_part,
        )
        object.__setattr__(self, "__class__", Slab)

    def __reduce__(self) -> tuple[type[Slab], tuple[object, ...]]:
        return Slab, (self.local, self.layout, self.mesh)


register_pytree_node(
    WatchedSlab,
    flatten,
    lambda leaves, context: Slab(*leaves, *context),
    serialized_type_name="hyperslab.WatchedSlab",
)

_AS_TENSORS_DO = {
    getattr(member, "fget", member).__code__
    for member in (Slab.__dict__[name] for name in _LIKE_TENSORS.split())
}


class Watch:
    """What a pass on Slabs does that it could not do, or not as fast, on plain tensors."""

    def __init__(self) -> None:
        self.why = ""
        """Why Slabs are needed; empty while they are not."""
        self._shown: list[weakref.ref[WatchedSlab]] = []
        self._num_read = self._num_pooled = 0

    def need(self, why: str) -> None:
        self.why = self.why or why

    def show(self, slab: Slab) -> WatchedSlab:
        shown = WatchedSlab(slab, self)
        self._shown.append(weakref.ref(shown))
        return shown

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``dispatch`` of the Slabs inside."""
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_slab)
        watched = [leaf for leaf in leaves if isinstance(leaf, WatchedSlab)]
        inner = [leaf.inner if isinstance(leaf, WatchedSlab) else leaf for leaf in leaves]
        if len(watched) < sum(map(is_slab, leaves)):
            self.need("a Slab comes from elsewhere")
        args, kwargs = tree_unflatten(inner, spec)
        self._look(function, args, [leaf for leaf in inner if is_slab(leaf)])
        before = num_drawn()
        out = dispatch(function, args, kwargs)
        if num_drawn() != before:
            self.need("random numbers are drawn, by another function than a layer of dropout")
        if function in _VIEWS and not _share_memory(args[0], out):
            self.need("a view is taken of memory that torch cannot view so")
        known = {id(leaf.inner): leaf for leaf in watched}  # of which functions in place return one

        def shown(leaf: Any) -> Any:
            if not is_slab(leaf):
                return leaf
            self._look_at_size(leaf)
            return known[id(leaf)] if id(leaf) in known else self.show(leaf)

        return tree_map(shown, out, is_leaf=is_slab)

    def _look(
        self, function: Callable[..., Any], args: tuple[Any, ...], slabs: Iterable[Slab]
    ) -> None:
        for slab in slabs:
            self._look_at_size(slab)
            self._num_read += slab.numel()
        if function not in OPS:
            self.need("a function has no rule")
        x = args[0] if args else None
        if isinstance(x, Slab):
            self._look_at_kernels(function, x, args)

    def _look_at_size(self, slab: Slab) -> None:
        if slab.numel() > tiles.MAX_NUMEL:
            self.need("a tensor is too large for one call")

    def _look_at_kernels(
        self, function: Callable[..., Any], x: Slab, args: tuple[Any, ...]
    ) -> None:
        is_conv = getattr(function, "__name__", "").startswith("conv")
        if is_conv and avoids_any():
            self.need("a convolution of the GPU's own is wrong")
        if x.numel() < fused.MIN_NUMEL or not fused.is_measured(x.mesh.device):
            return
        self._num_pooled += x.numel() if function in POOLS else 0
        weight = args[1] if len(args) > 1 else None
        if is_conv and isinstance(weight, Tensor) and _has_kernel(weight):
            self.need("a convolution has a kernel of ours")

    def hide(self, out: Any) -> tuple[Any, Recipe]:
        """The output of the pass without watched Slabs, and how to make a plain one like it."""
        leaves, spec = tree_flatten(out, is_leaf=is_slab)
        if not all(isinstance(leaf, (WatchedSlab, Tensor, *PLAIN)) for leaf in leaves):
            self.need("an output is, or may hold, a Slab that was not watched")
        leaves = [leaf.inner if isinstance(leaf, WatchedSlab) else leaf for leaf in leaves]
        slabs = [leaf if is_slab(leaf) else None for leaf in leaves]
        if any(slab is not None and hasattr(slab.local, "shares_with") for slab in slabs):
            self.need("an output shares memory, which autograd does not know")
        views = [None if slab is None else (slab.is_view, slab.is_part) for slab in slabs]
        return tree_unflatten(leaves, spec), Recipe(spec, views)

    def end(self) -> None:
        """Looks at the whole of the pass. Slabs that are kept beyond it become like any others."""
        if self._num_pooled >= POOLED_SHARE * self._num_read > 0:
            self.need("fused pools do a share of the work")
        if self._kept():
            gc.collect()
        for slab in self._kept():
            self.need("a Slab is kept beyond the pass")
            slab.settle()

    def _kept(self) -> list[WatchedSlab]:
        return [slab for slab in (each() for each in self._shown) if slab is not None]


_VIEWS = {Tensor.view, Tensor.view_as}


def _share_memory(x: Any, out: Any) -> bool:
    pieces = [each.local.untyped_storage().data_ptr() for each in (x, out) if is_slab(each)]
    return len(set(pieces)) == 1


def _has_kernel(weight: Tensor) -> bool:
    dtype = autocast_dtype(weight)
    is_supported = few_channels.is_supported(weight, dtype, steps=(), groups=1)
    return is_supported and few_channels.is_weight_grad_faster(weight, dtype)


@dataclass(frozen=True)
class Recipe:
    """Where Slabs are in a pass's output."""

    spec: TreeSpec
    views: Sequence[tuple[bool, bool] | None]
    """For each output that was a Slab, whether it was a view and a part."""

    def wrap(self, out: Any, mesh: Mesh) -> Any:
        """``out`` of a plain pass with Slabs; if it has changed, every tensor becomes one."""
        leaves, spec = tree_flatten(out, is_leaf=is_slab)
        views = self.views if spec == self.spec else [(False, False)] * len(leaves)
        wrapped = [
            Slab(leaf, Layout.unsplit(leaf.shape), mesh, *view)
            if view is not None and isinstance(leaf, Tensor)
            else leaf
            for leaf, view in zip(leaves, views, strict=True)
        ]
        return tree_unflatten(wrapped, spec)
