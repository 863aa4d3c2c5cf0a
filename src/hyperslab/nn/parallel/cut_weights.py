"""Weights that are cut along the channel axis: DTensors at rest, Slabs where they meet Slabs.

Each rank keeps a part of a weight, of its gradient and of the optimizer's state. Rules see a weight
as a Slab, whose layout says who holds what, so that what a module makes of it is exact or refused,
as with any Slab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase

from hyperslab.comm.mesh import Mesh, mesh_of_device_mesh
from hyperslab.errors import LayoutError
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import Box, Layout, Split, cut_in_chunks
from hyperslab.nn.dispatch import slabs_of_weights
from hyperslab.nn.parallel.outside_tensors import mean_of
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_map

Dims = Mapping[str, int]
"""Along which dim each weight or buffer of a layer is cut, by its name."""

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def _cut_of_convolution(layer: Any, given: str | None) -> Dims:
    """Along filters or channels, whichever moves fewer bytes, unless that is ``given``.

    To keep filters, the input is gathered; to keep channels, the output is scattered. Their sizes
    differ by the stride. Groups are known by dim 0 alone.
    """
    step, transposed = math.prod(layer.stride), layer.transposed
    gathered, scattered = layer.in_channels, layer.out_channels
    gathered, scattered = (
        (gathered, scattered * step) if transposed else (gathered * step, scattered)
    )
    keeps_filters = given == "filter" if given else gathered <= scattered
    dim = 0 if layer.groups > 1 or keeps_filters != transposed else 1
    return {"weight": dim, "bias": 0}


def _cut_of_linear(layer: Any, given: str | None) -> Dims:
    keeps_filters = given == "filter" if given else layer.in_features <= layer.out_features
    return {"weight": 0 if keeps_filters else 1, "bias": 0}


def _cut_of_attention(layer: nn.Module, given: str | None) -> Dims:
    names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    return dict.fromkeys(names, 0)


def _cut_per_channel(layer: nn.Module, given: str | None) -> Dims:
    return dict.fromkeys(_PER_CHANNEL, 0)


_CUTS: Mapping[type[nn.Module], Callable[[Any, str | None], Dims]] = {
    nn.modules.conv._ConvNd: _cut_of_convolution,
    nn.Linear: _cut_of_linear,
    nn.MultiheadAttention: _cut_of_attention,
    _NormBase: _cut_per_channel,
    nn.GroupNorm: _cut_per_channel,
    nn.LayerNorm: _cut_per_channel,
    nn.RMSNorm: _cut_per_channel,
    nn.PReLU: _cut_per_channel,
}
"""The layers whose weights are cut. Those of others stay whole on every rank."""


def cut_weights(module: nn.Module, mesh: Mesh, split: str | None = None) -> None:
    """Makes the weights of ``module`` DTensors on the channel axis of ``mesh``.

    Each rank keeps its part of what it has now, or all where the layer is not known. Weights that
    layers share stay shared. All are DTensors because ``clip_grad_norm_`` and optimizers that
    compute many weights at once want them of one kind.
    """
    done: dict[int, Tensor] = {}
    for layer in module.modules():
        for table, name, dim in _weights_to_cut(layer, split):
            whole = table[name]
            if isinstance(whole, DTensor):
                continue
            if id(whole) not in done:
                done[id(whole)] = _cut(whole, dim, mesh)
            table[name] = done[id(whole)]
    for layer in module.modules():
        for name, whole in layer._parameters.items():
            if whole is not None and not isinstance(whole, DTensor):
                if id(whole) not in done:
                    done[id(whole)] = _cut(whole, None, mesh)
                layer._parameters[name] = done[id(whole)]  # type: ignore[assignment]


def _weights_to_cut(
    layer: nn.Module, split: str | None
) -> Iterator[tuple[dict[str, Any], str, int]]:
    for cls, find in _CUTS.items():
        if not isinstance(layer, cls):
            continue
        for name, dim in find(layer, split).items():
            for table in (layer._parameters, layer._buffers):
                if isinstance(table.get(name), Tensor):
                    yield table, name, dim


@torch.no_grad()
def _cut(whole: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    """Numbers that are one for all channels stay on every rank, as do those without ``dim``."""
    over = mesh.device_mesh("channel")
    placement: Placement = Replicate() if dim is None or whole.numel() == 1 else Shard(dim)
    piece = whole.detach()
    if placement.is_shard():
        layout = _layout(tuple(whole.shape), (placement,), ("channel",), (over.size(),))
        piece = piece[layout.box(mesh.coords).slices_in(Box.whole(whole.shape))]
    piece = piece.clone(memory_format=memory_format_of(whole))
    cut = DTensor.from_local(
        piece, over, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    if isinstance(whole, nn.Parameter):
        return nn.Parameter(cut, whole.requires_grad)
    return cut


def is_cut(weight: object) -> bool:
    """Whether ``weight`` is one that ``cut_weights`` made, or was computed of such."""
    return isinstance(weight, DTensor) and mesh_of_device_mesh(weight.device_mesh) is not None


class PlainWhole:
    """A ``forward`` that finds plain tensors in the place of weights that are whole on every rank.

    Such weights may meet plain tensors, which do not mix with DTensors.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], mesh: Mesh) -> None:
        self._module, self._forward, self._mesh = module, forward, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            from hyperslab.nn.compile import refuse_compiling  # loads the compiler

            advice = "use it as it is, or a mesh without a channel axis"
            refuse_compiling("a module whose weights are cut along channels", advice)
        found = [
            (part._parameters, name, weight)
            for part in self._module.modules()
            for name, weight in part._parameters.items()
            if is_cut(weight) and all(p.is_replicate() for p in weight.placements)  # type: ignore[union-attr]
        ]
        plain = {id(weight): _local(weight, self._mesh) for _, _, weight in found}  # type: ignore[arg-type]
        for table, name, weight in found:
            table[name] = plain[id(weight)]  # type: ignore[assignment]
        try:
            return self._forward(*args, **kwargs)
        finally:
            for table, name, weight in found:
                table[name] = weight


@lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
) -> Layout:
    layout = Layout.unsplit(shape)
    for placement, axis, num in zip(placements, axes, sizes, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            layout = layout.with_dim(dim, shape[dim], Split(axis, cut_in_chunks(shape[dim], num)))
    return layout


@slabs_of_weights
def slab_of_weight(value: Any, mesh: Mesh) -> Any:
    """``value``, or what is in it, with Slabs on ``mesh`` for cut weights."""
    if isinstance(value, tuple | list):
        return tree_map(lambda leaf: slab_of_weight(leaf, mesh), value, is_leaf=is_slab)
    if not is_cut(value):
        return value
    weight: DTensor = value
    axes = weight.device_mesh.mesh_dim_names
    assert axes is not None
    if any(axis not in mesh.grid.long_axes for axis in axes) or (
        mesh.device_mesh(*axes) != weight.device_mesh
    ):
        raise LayoutError(
            f"a weight of shape {tuple(weight.shape)} is cut over {' x '.join(axes)}, and meets a "
            f"Slab on {mesh.grid.describe()}, where other ranks share channels: use it within the "
            "module that the plan names, or plan both alike"
        )
    if any(placement.is_partial() for placement in weight.placements):
        weight = weight.redistribute(placements=[Replicate()] * len(axes))
    sizes = tuple(weight.device_mesh.size(i) for i in range(len(axes)))
    layout = _layout(tuple(weight.shape), weight.placements, axes, sizes)
    local = _local(weight, mesh)
    return Slab(local, layout, mesh) if layout.split_dims else local


def _local(weight: DTensor, mesh: Mesh) -> Tensor:
    """This rank's part, whose gradient becomes that of one process."""
    if weight.requires_grad and torch.is_grad_enabled():
        return mean_of(weight, mesh)
    local: Tensor = weight.to_local()
    return local
