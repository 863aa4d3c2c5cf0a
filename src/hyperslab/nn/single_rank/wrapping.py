"""Slabs of one rank and the plain tensors in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hyperslab.comm.mesh import Mesh
from hyperslab.layout import Layout
from hyperslab.nn.outputs import fields_of, is_record, replaced
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import tree_map


def unwrap(tree: Any, given: dict[int, Slab]) -> Any:
    """``tree`` with plain tensors for its Slabs, which are noted in ``given`` by the tensors."""

    def unwrap_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Slab):
            given[id(leaf.local)] = leaf
            return leaf.local
        return _with_fields(leaf, lambda value: unwrap(value, given)) if is_record(leaf) else leaf

    return tree_map(unwrap_leaf, tree, is_leaf=is_record)


def wrap(tree: Any, mesh: Mesh, given: dict[int, Slab]) -> Any:
    """``tree`` with Slabs for its tensors, but not for weights and single numbers."""
    if type(tree) is Tensor:  # as most are, in a tenth of the time
        found = given.get(id(tree))
        return found if found is not None else as_slab(tree, mesh) if tree.ndim else tree

    def wrap_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and not isinstance(leaf, Parameter):
            return given[id(leaf)] if id(leaf) in given else as_slab(leaf, mesh)
        if is_record(leaf) and not isinstance(leaf, Slab):
            return _with_fields(leaf, lambda value: wrap(value, mesh, given))
        return leaf

    return tree_map(wrap_leaf, tree, is_leaf=is_record)


def _with_fields(record: Any, function: Callable[[Any], Any]) -> Any:
    """``record`` with ``function`` of each of its fields; itself, if that changes none."""
    fields = fields_of(record)
    new = {name: function(value) for name, value in fields.items()}
    return record if all(new[name] is fields[name] for name in fields) else replaced(record, new)


def as_slab(x: Tensor, mesh: Mesh) -> Slab:
    """The Slab of a tensor on one rank."""
    return Slab(x, Layout.unsplit(x.shape), mesh, x._base is not None)
