"""What flows through a parallel model: a rank's piece together with the layout of the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.layout import Box, Grid, Layout
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import unsupported
from hyperslab.torch_private import PYTREE_MODULE, register_container, unpatched


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Slab:
    """This rank's piece of a global tensor. To torch functions it is the global tensor.

    Its attributes and methods are those of a tensor of the global shape; a function runs by its
    rule (``hyperslab.register``) or raises ``UnsupportedOp``. ``local`` is an ordinary tensor with
    an ordinary autograd graph.
    """

    local: Tensor
    layout: Layout
    mesh: Mesh
    is_view: bool = False
    """Whether it shares the memory of another Slab."""
    is_part: bool = False
    """Whether that is, or may be, longer along a split dim.

    The pieces then do not tell whether the whole has gaps in memory: some may be whole themselves.
    """

    def __init__(
        self,
        local: Tensor,
        layout: Layout,
        mesh: Mesh,
        is_view: bool = False,
        is_part: bool = False,
    ) -> None:
        """As a dataclass does it, in a third of the time: every operator makes a Slab."""
        fields = self.__dict__
        fields["local"], fields["layout"], fields["mesh"] = local, layout, mesh
        if is_view or is_part:
            fields["is_view"], fields["is_part"] = is_view, is_part

    __array_ufunc__ = None  # so that numpy leaves ``np.float64(2) * x`` to us
    _run = staticmethod(dispatch)  # what computes a function of Slabs of this class

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return cls._run(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """The tensor's method or attribute ``name``, by its rule."""
        found = getattr(Tensor, name, None)
        if callable(found) and not name.startswith("__"):  # copy, pickle and numpy ask for those
            return partial(_call, unpatched(found), self)
        why = f"a Slab has no attribute {name!r}"
        if found is not None and not name.startswith("_") and name not in _FIELDS:
            try:
                return self._run(found.__get__, (self,), {})
            except UnsupportedOp as refusal:
                why = str(refusal)
        raise AttributeError(
            f"{why}: hyperslab.gather(x) gives the whole tensor, x.local this rank's piece"
        )

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self.layout.shape)

    @property
    def box(self) -> Box:
        """Where the piece lies in the global tensor."""
        return self.layout.box(self.mesh.coords)

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def data(self) -> Slab:
        """The same memory outside the autograd graph."""
        return self.detached(self.local.data)

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.local.is_cuda

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    ndimension, nelement = dim, numel  # as tensors spell them too

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def is_complex(self) -> bool:
        return self.local.is_complex()

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether this rank's piece is."""
        return self.local.is_contiguous(memory_format=memory_format)

    def element_size(self) -> int:
        return self.local.element_size()

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Calls ``hook`` with the gradient, on one rank; several hold parts of its sum."""
        self._check_single_rank(Tensor.register_hook)
        return self.local.register_hook(hook)

    def retain_grad(self) -> None:
        """Keeps the gradient, on one rank; several hold parts of its sum."""
        self._check_single_rank(Tensor.retain_grad)
        self.local.retain_grad()

    def _check_single_rank(self, function: Callable[..., Any]) -> None:
        if self.mesh.num_ranks > 1:
            why = "each rank holds a part of a gradient of all ranks' losses, not the gradient"
            raise unsupported(function, self, why)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a Slab without dims has no length")
        return self.layout.shape[0]

    def __iter__(self) -> Iterator[Slab | Tensor]:
        if not self.ndim:
            raise TypeError("a Slab without dims cannot be iterated over")
        if not self.is_floating_point() and not self.is_complex():
            # In plain[x] torch iterates over x, and takes its items for indices of several dims.
            why = "as an index it would be taken for a tuple: use x.unbind(0), or gather it"
            raise unsupported(Tensor.__iter__, self, why)
        return iter(self.unbind(0))

    def __array__(self, *_: object, **__: object) -> Never:
        raise TypeError("a Slab is no array: hyperslab.gather(x) gives the whole tensor")

    def __dlpack__(self, *_: object, **__: object) -> Never:
        """What torch.tensor and others like it ask for."""
        raise UnsupportedOp(
            "torch.tensor, torch.asarray and others that make a plain tensor cannot run on a Slab: "
            "use x.detach().clone() or torch.as_tensor(x), or call hyperslab.gather(x) first to "
            "have the whole tensor on every rank"
        )

    __dlpack_device__ = __dlpack__

    def __bool__(self) -> bool:
        return bool(self._number("truth value"))

    def __int__(self) -> int:
        return int(self._number("value as one number"))

    def __float__(self) -> float:
        return float(self._number("value as one number"))

    def __complex__(self) -> complex:
        return complex(self._number("value as one number"))

    def _number(self, what: str) -> Any:
        """The only element. Collective over the mesh, if an axis splits it."""
        if self.numel() != 1:
            raise TypeError(f"a Slab has no {what}: hyperslab.gather(x) gives the whole tensor")
        return self.item()

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec) if self.ndim else format(self.item(), spec)

    def with_local(self, local: Tensor, layout: Layout | None = None) -> Slab:
        """A Slab on the same mesh with another piece, and another layout if one is given."""
        return Slab(local, layout or self.layout, self.mesh)

    def viewed(self, local: Tensor, layout: Layout, *, is_part: bool = False) -> Slab:
        """A Slab on the same mesh whose piece is a view of this one's."""
        return Slab(local, layout, self.mesh, True, self.is_part or is_part)

    def detached(self, local: Tensor) -> Slab:
        """This Slab outside its graph; ``local`` shares its memory, which autograd does not know.

        The piece is told what it shares memory with, for ``view_copy``.
        """
        base = self.local if self.local._base is None else self.local._base
        local.shares_with = getattr(base, "shares_with", base)  # type: ignore[attr-defined]
        return self.viewed(local, self.layout)

    def on(self, mesh: Mesh) -> Slab:
        """This Slab with the settings of ``mesh``, which has the same ranks in the same places."""
        if mesh is self.mesh:
            return self
        check_one_grid((self.mesh.grid, mesh.grid))
        return replace(self, mesh=mesh)

    def __reduce__(self) -> tuple[type[Slab], tuple[object, ...]]:
        """For copies and pickles; a pickle is loaded on the same mesh by the same rank."""
        return Slab, (self.local, self.layout, self.mesh, self.is_view, self.is_part)

    def __repr__(self) -> str:
        return (
            f"Slab({self.layout.describe()}; rank {self.mesh.rank} holds "
            f"{'x'.join(map(str, self.local.shape))}, {self.dtype}, {self.device})"
        )


def everywhere(x: Slab | Tensor, like: Slab) -> Slab:
    """``x``, or the Slab beside ``like`` of a plain tensor, which is whole on every rank."""
    return x if isinstance(x, Slab) else like.with_local(x, Layout.unsplit(x.shape))


def layout_of(x: Slab | Tensor) -> Layout:
    """That of a Slab, or of a plain tensor, which is whole on every rank."""
    return x.layout if isinstance(x, Slab) else Layout.unsplit(x.shape)


def check_one_grid(grids: Iterable[Grid]) -> None:
    """Raises where tensors of different meshes meet: their pieces lie on different ranks."""
    if len(known := set(grids)) > 1:
        shown = " and ".join(sorted(grid.describe() for grid in known))
        raise LayoutError(
            f"tensors of different meshes cannot meet: {shown}; shard both on one mesh"
        )


def _call(function: Callable[..., Any], x: Slab, /, *args: Any, **kwargs: Any) -> Any:
    return x._run(function, (x, *args), kwargs)


_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv
    mod rmod imod pow rpow ipow matmul rmatmul neg pos abs invert and rand iand or ror ior xor rxor
    ixor lshift rlshift ilshift rshift rrshift irshift eq ne lt le gt ge getitem setitem contains
    reversed
"""


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def operate(x: Slab, *args: Any) -> Any:
        return x._run(function, (x, *args), {})

    operate.__name__ = name
    return operate


for _name in _OPERATORS.split():
    setattr(Slab, f"__{_name}__", _operator(f"__{_name}__"))
Slab.__hash__ = object.__hash__  # type: ignore[method-assign]  # __eq__ compares elements


_FIELDS = ("local", "layout", "mesh")
_CHANGE_LAYOUT = """
    squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ resize_ resize_as_ as_strided_ set_
"""


def _refusal(name: str) -> Callable[..., Never]:
    function = getattr(Tensor, name)

    def refuse(x: Slab, *args: Any, **kwargs: Any) -> Never:
        raise unsupported(function, x, f"a Slab's layout is fixed: use {name.rstrip('_')}")

    return refuse


for _name in _CHANGE_LAYOUT.split():
    setattr(Slab, _name, _refusal(_name))


def getter(name: str) -> Callable[..., Any]:
    """The function that reads the attribute ``name`` of a tensor, to register a rule for."""
    get: Callable[..., Any] = getattr(Tensor, name).__get__
    return get


ONLY_SLABS = {Slab}
"""What ``{*map(type, args)}`` is where all arguments are Slabs, as those of most passes are."""


def is_slab(leaf: object) -> bool:
    """For ``tree_map(..., is_leaf=is_slab)``, which otherwise looks into Slabs."""
    return isinstance(leaf, Slab)


_LOOK_INSIDE = ("torch.distributed", "torch.nn", "torch._dynamo", "torch.utils.", "hyperslab")


def check_looks_inside() -> None:
    """Raises unless the caller of torch's pytrees is one who may see the piece of a Slab.

    To others, as to ``tree_map`` in a model or to ``torch.vmap``, it would look like the whole.
    """
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"] == PYTREE_MODULE:
        frame = frame.f_back
    if not frame.f_globals["__name__"].startswith(_LOOK_INSIDE):
        raise UnsupportedOp(
            "a Slab is no container of tensors: give tree_map and the like "
            "is_leaf=lambda leaf: isinstance(leaf, hs.Slab); torch.func and vmap cannot run on it"
        )


def flatten(slab: Slab) -> tuple[list[Tensor], tuple[Layout, Mesh, bool, bool]]:
    """The piece, and what else makes a Slab of it: for torch's pytrees."""
    check_looks_inside()
    return [slab.local], (slab.layout, slab.mesh, slab.is_view, slab.is_part)


# FSDP2 finds the tensors in a module's inputs and outputs this way.
register_container(
    Slab,
    flatten,
    lambda leaves, context: Slab(*leaves, *context),
    serialized_type_name="hyperslab.Slab",
)
