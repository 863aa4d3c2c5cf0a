"""Functions without a rule: exact on tensors that are whole on every rank, refused on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from hyperslab.errors import UnsupportedOp
from hyperslab.layout import Layout
from hyperslab.nn.op import name_of, unsupported
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_leaves, tree_map, untraced

_RESHAPING = ("addbmm_", "as_strided_", "resize_as_", "resize_as_sparse_")
"""Functions that give a tensor another shape, beside the methods that a Slab itself refuses."""


def run_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refusal: UnsupportedOp | None = None,
) -> Any:
    """Runs ``function`` on Slabs that no axis splits, as every rank then holds the whole.

    For others it raises ``refusal``, if the function's rule gave one.
    """
    leaves = tree_leaves((args, kwargs), is_leaf=is_slab)
    slabs = list(filter(is_slab, leaves))
    if slabs and kwargs.get("out") is not None:  # torch may resize it
        raise unsupported(function, slabs[0], "out= is not supported")
    for slab in slabs:
        if slab.layout.split_dims:
            raise refusal or unsupported(function, slab)
    if not slabs:
        raise UnsupportedOp(
            f"{name_of(function)} cannot run on split tensors that it is given inside an object: "
            "call hyperslab.gather(x) first to have the whole tensor on every rank"
        )
    first = slabs[0]
    _check_whole(function, first, leaves)
    before = _random_state(first)
    args, kwargs = tree_map(_local, (args, kwargs), is_leaf=is_slab)
    out = function(*args, **kwargs)
    if first.mesh.num_ranks > 1 and _random_state(first) != before:
        raise unsupported(function, first, _RANDOM)
    owners: dict[int, Slab | Tensor] = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)
    }
    owners |= {id(slab.local): slab for slab in slabs}
    return tree_map(lambda leaf: _as_slab(leaf, first, owners), out)


_RANDOM = "it draws random numbers, which differ between ranks"


def _check_whole(function: Callable[..., Any], first: Slab, leaves: list[Any]) -> None:
    """Raises where each rank holds the whole and the function would still go wrong."""
    if getattr(function, "__name__", "") in _RESHAPING:
        raise unsupported(function, first, "it changes the tensor's shape in place")
    if first.mesh.num_ranks > 1 and any(isinstance(leaf, Generator) for leaf in leaves):
        raise unsupported(function, first, _RANDOM)


def _local(leaf: Any) -> Any:
    return leaf.local if isinstance(leaf, Slab) else leaf


def _as_slab(leaf: Any, like: Slab, owners: dict[int, Slab | Tensor]) -> Any:
    """A tensor in the output as a Slab; an input changed in place stays what it was."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return leaf
    if id(leaf) in owners:
        return owners[id(leaf)]
    return like.with_local(leaf, Layout.unsplit(leaf.shape))


@untraced()
def _random_state(slab: Slab) -> tuple[bytes, int]:
    cuda = torch.cuda.default_generators[slab.device.index or 0].get_offset() if slab.is_cuda else 0
    return torch.get_rng_state().numpy().tobytes(), cuda
