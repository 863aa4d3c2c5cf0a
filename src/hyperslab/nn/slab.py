"""What flows through a parallel model: a rank's piece together with the layout of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Never

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import LayoutError
from hyperslab.layout import Box, Grid, Layout
from hyperslab.nn.registry import dispatch


@dataclass(frozen=True, eq=False, repr=False)
class Slab:
    """This rank's piece of a global tensor. To torch functions it is the global tensor.

    Its attributes and methods are those of a tensor of the global shape; a function runs by its
    rule (``hyperslab.register``) or raises ``UnsupportedOp``. ``local`` is an ordinary tensor with
    an ordinary autograd graph.
    """

    local: Tensor
    layout: Layout
    mesh: Mesh

    __array_ufunc__ = None  # so that numpy leaves ``np.float64(2) * x`` to us

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """The tensor's method ``name``, by its rule."""
        method = getattr(Tensor, name, None)
        if callable(method) and not name.startswith("__"):  # copy, pickle and numpy ask for those
            return partial(_call, method, self)
        raise AttributeError(
            f"a Slab has no attribute {name!r}: hyperslab.gather(x) gives the whole tensor, "
            "x.local this rank's piece"
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

    def __len__(self) -> int:
        return self.layout.shape[0]

    def __iter__(self) -> Iterator[Never]:
        raise TypeError(
            "a Slab cannot be iterated over: hyperslab.gather(x) gives the whole tensor"
        )

    def __array__(self, *_: object, **__: object) -> Never:
        raise TypeError("a Slab is no array: hyperslab.gather(x) gives the whole tensor")

    def __bool__(self) -> bool:
        raise TypeError("a Slab has no truth value: hyperslab.gather(x) gives the whole tensor")

    def with_local(self, local: Tensor, layout: Layout | None = None) -> Slab:
        """A Slab on the same mesh with another piece, and another layout if one is given."""
        return Slab(local, layout or self.layout, self.mesh)

    def on(self, mesh: Mesh) -> Slab:
        """This Slab with the settings of ``mesh``, which has the same ranks in the same places."""
        if mesh is self.mesh:
            return self
        check_one_grid((self.mesh.grid, mesh.grid))
        return replace(self, mesh=mesh)

    def __repr__(self) -> str:
        return (
            f"Slab({self.layout.describe()}; rank {self.mesh.rank} holds "
            f"{'x'.join(map(str, self.local.shape))}, {self.dtype}, {self.device})"
        )


def check_one_grid(grids: Iterable[Grid]) -> None:
    """Raises where tensors of different meshes meet: their pieces lie on different ranks."""
    if len(known := set(grids)) > 1:
        shown = " and ".join(sorted(grid.describe() for grid in known))
        raise LayoutError(
            f"tensors of different meshes cannot meet: {shown}; shard both on one mesh"
        )


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return dispatch(function, args, kwargs)


_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod rmod
    pow rpow ipow matmul rmatmul neg pos abs invert and rand or ror xor rxor eq ne lt le gt ge
    getitem setitem
"""


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def operate(*args: Any) -> Any:
        return dispatch(function, args, {})

    operate.__name__ = name
    return operate


for _name in _OPERATORS.split():
    setattr(Slab, f"__{_name}__", _operator(f"__{_name}__"))
Slab.__hash__ = object.__hash__  # type: ignore[method-assign]  # __eq__ compares elements


def is_slab(leaf: object) -> bool:
    """For ``tree_map(..., is_leaf=is_slab)``, which otherwise looks into Slabs."""
    return isinstance(leaf, Slab)


# FSDP2 finds the tensors in a module's inputs and outputs this way.
register_pytree_node(
    Slab,
    lambda slab: ([slab.local], (slab.layout, slab.mesh)),
    lambda leaves, context: Slab(*leaves, *context),
    serialized_type_name="hyperslab.Slab",
)
