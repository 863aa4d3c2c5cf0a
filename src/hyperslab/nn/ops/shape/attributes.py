"""What model code reads of a tensor besides its elements, and tensors made like it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hyperslab.layout import integers
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.shape.arrange import flip
from hyperslab.nn.ops.shape.dims import unpacked
from hyperslab.nn.placement import gather
from hyperslab.nn.slab import Slab, getter

_OF_EVERY_PIECE = """
    grad_fn is_cpu is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized
    is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize output_nr retains_grad
"""


def _make_attribute(name: str) -> None:
    @define("shape", getter(name))
    def attribute(x: Slab) -> Any:
        return getattr(x.local, name)


for _name in _OF_EVERY_PIECE.split():
    if hasattr(Tensor, _name):
        _make_attribute(_name)


@define("shape", getter("nbytes"))
def nbytes(x: Slab) -> int:
    """The size of the whole tensor."""
    return x.numel() * x.local.itemsize


@define("shape", getter("grad"))
def grad(x: Slab) -> Slab | None:
    """The gradient, on one rank; several hold parts of its sum."""
    piece = x.local
    kept = piece.grad if piece.is_leaf or piece.retains_grad else None
    if kept is None:
        return None
    if x.mesh.num_ranks > 1:
        raise AttributeError(
            f"the gradient of a Slab of {x.layout.describe()} is not kept, as each rank holds a "
            "part of that of all ranks' losses: call requires_grad_() on the plain tensor before "
            "hyperslab.shard, and read the gradient there"
        )
    return x.with_local(kept)


@define("shape", Tensor.item)
def item(x: Slab) -> Any:
    """The only element. Collective over the mesh, if an axis splits it."""
    if x.numel() != 1:
        raise unsupported(Tensor.item, x, "it has more than one element, or none")
    return gather(x.detach()).item()


@define("shape", Tensor.__contains__)
def contains(x: Slab, element: Any) -> bool:
    """Whether an element of the whole tensor equals ``element``."""
    found: Any = x == element
    return bool(found.any())


@define("shape", Tensor.__reversed__)
def backwards(x: Slab) -> Slab:
    """``x`` backwards along dim 0."""
    return flip(x, 0) if x.ndim else x


@define("shape", Tensor.backward)
def backward(
    self: Slab,
    gradient: Slab | Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Differentiates the only element, or the sum of all that ``gradient`` weighs."""
    x: Any = self
    if gradient is None and x.numel() != 1:
        raise unsupported(Tensor.backward, x, "it is no loss: reduce it, as by x.mean()")
    loss = (x if gradient is None else x * gradient.detach()).sum()
    loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)


def _make_new(name: str) -> None:
    function = getattr(Tensor, name)

    @define("shape", function)
    def new(x: Slab, *size: Any, **kwargs: Any) -> Slab | Tensor:
        """A Slab like ``x`` if it is to have its shape, else a plain tensor, whole everywhere."""
        sizes = integers(unpacked(size or (kwargs.pop("size"),)))
        if sizes != x.layout.shape:
            plain: Tensor = function(x.local, sizes, **kwargs)
            return plain
        return x.with_local(function(x.local, tuple(x.local.shape), **kwargs))


for _name in ("new_zeros", "new_ones", "new_empty"):
    _make_new(_name)


@define("shape", Tensor.new_full)
def new_full(self: Slab, size: Any, fill_value: Any, **kwargs: Any) -> Slab | Tensor:
    """A tensor of one number; see ``new_zeros`` for what it is."""
    x, sizes = self, integers(size)
    if sizes != x.layout.shape:
        return x.local.new_full(sizes, fill_value, **kwargs)
    return x.with_local(x.local.new_full(tuple(x.local.shape), fill_value, **kwargs))


@define("shape", Tensor.new_tensor)
def new_tensor(self: Slab, data: Any, **kwargs: Any) -> Tensor:
    """A plain tensor of ``data`` with the dtype and device of a Slab."""
    return self.local.new_tensor(data, **kwargs)
