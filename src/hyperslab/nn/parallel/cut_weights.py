"""Weights that are cut over ranks: DTensors at rest, Slabs where they meet Slabs.

Each rank keeps a part of a weight, of its gradient and of the optimizer's state. Rules see a weight
as a Slab, whose layout says who holds what, so that what a module makes of it is exact or refused,
as with any Slab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from hyperslab.comm.mesh import Mesh, mesh_of_device_mesh
from hyperslab.errors import ConfigError
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import AXES, Box, Layout, Split, cut_in_chunks, recut_over
from hyperslab.nn.dispatch import before_meetings, meetings
from hyperslab.nn.op import Function, is_operand, writes_in_place
from hyperslab.nn.parallel.outside_tensors import mean_of
from hyperslab.nn.placement import move
from hyperslab.nn.slab import Slab
from hyperslab.torch_private import tree_leaves, tree_map

Dims = Mapping[str, int]
"""Along which dim each weight or buffer of a layer is cut, by its name."""

Placements = Mapping[str, int]
"""Which axis cuts which dim of a weight."""


class ModuleCut(NamedTuple):
    """How a module and its parts are cut."""

    mesh: Mesh
    split: str | None = None
    """``filter``, ``channel`` or ``blocks``, where that is given for its weights."""


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


def cut_weights(module: nn.Module, cut_of: Callable[[str], ModuleCut]) -> bool:
    """Makes the weights of ``module`` DTensors where the mesh cuts channels; whether it does.

    ``cut_of`` gives the cut of the layer of a name. Each rank keeps its part of what it has now, or
    all where the layer is not known. Weights that layers share stay shared. All are DTensors
    because ``clip_grad_norm_`` and optimizers that compute many weights at once want them of one
    kind, and on one mesh.
    """
    done: dict[int, Tensor] = {}
    blocks = _Blocks()
    layers = [(layer, cut_of(name)) for name, layer in module.named_modules()]
    layers = [(layer, cut) for layer, cut in layers if cut.mesh.grid.size("channel") > 1]
    has_blocks = any(cut.split == "blocks" for _, cut in layers)
    for layer, cut in layers:
        axes = _axes(cut.mesh, has_blocks)
        for table, key, placements in _weights_to_cut(layer, cut, blocks):
            whole = table[key]
            if isinstance(whole, DTensor):
                continue
            if id(whole) not in done:
                done[id(whole)] = _cut(whole, placements, cut.mesh, axes)
            table[key] = done[id(whole)]
    for layer, cut in layers:
        for name, weight in layer._parameters.items():
            if weight is not None and not isinstance(weight, DTensor):
                if id(weight) not in done:
                    done[id(weight)] = _cut(weight, {}, cut.mesh, _axes(cut.mesh, has_blocks))
                layer._parameters[name] = done[id(weight)]
    return bool(done)


def _axes(mesh: Mesh, has_blocks: bool) -> tuple[str, ...]:
    """The axes that DTensors know: channel, and the others too where blocks are cut over them."""
    return ("channel", *(mesh.axes_beside(["channel"]) if has_blocks else ()))


def _weights_to_cut(
    layer: nn.Module, cut: ModuleCut, blocks: _Blocks
) -> Iterator[tuple[dict[str, Any], str, Placements]]:
    for cls, find in _CUTS.items():
        if not isinstance(layer, cls):
            continue
        dims = find(layer, cut.split)
        by_name: dict[str, Placements] = {name: {"channel": dim} for name, dim in dims.items()}
        if cut.split == "blocks" and isinstance(layer, nn.Linear):
            by_name = blocks.next(cut.mesh)
        for name, placements in by_name.items():
            for table in (layer._parameters, layer._buffers):
                if isinstance(table.get(name), Tensor):
                    yield table, name, placements


class _Blocks:
    """Dense layers that are cut into blocks of rows and columns, one after the other.

    What cuts the rows of one, and so its outputs, cuts the columns of the next.
    """

    def __init__(self) -> None:
        self._num = 0

    def next(self, mesh: Mesh) -> dict[str, Placements]:
        columns, rows = "channel", _other_axis(mesh)
        if self._num % 2:
            columns, rows = rows, columns
        self._num += 1
        return {"weight": {rows: 0, columns: 1}, "bias": {rows: 0}}


def _other_axis(mesh: Mesh) -> str:
    others = mesh.axes_beside(["channel"])
    if len(others) != 1:
        raise ConfigError(
            "dense layers are cut into blocks over channel and one other axis, and the mesh is "
            f"{mesh.grid.describe()}"
        )
    return others[0]


@torch.no_grad()
def _cut(whole: Tensor, placements: Placements, mesh: Mesh, over_axes: Collection[str]) -> Tensor:
    """Numbers that are one for all channels stay on every rank, as do those without placements."""
    axes = tuple(axis for axis in AXES if axis in over_axes)
    over = mesh.device_mesh(*axes)
    found: list[Placement] = [
        Shard(placements[axis]) if axis in placements and whole.numel() > 1 else Replicate()
        for axis in axes
    ]
    sizes = tuple(map(mesh.grid.size, axes))
    box = _layout(tuple(whole.shape), tuple(found), axes, sizes).box(mesh.coords)
    if whole.is_meta:
        piece = torch.empty(box.shape, dtype=whole.dtype, device=mesh.device)
    else:
        piece = whole.detach()[box.slices_in(Box.whole(whole.shape))]
        piece = piece.clone(memory_format=memory_format_of(whole))
    cut = DTensor.from_local(
        piece, over, found, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(cut, whole.requires_grad) if isinstance(whole, nn.Parameter) else cut


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
            with _CutWeightsAmongPlain(self._mesh):
                return self._forward(*args, **kwargs)
        finally:
            for table, name, weight in found:
                table[name] = weight


class _CutWeightsAmongPlain(TorchFunctionMode):
    """Within it, cut weights are Slabs to functions that are given plain tensors too.

    Such a function gets no Slab that would say so, and torch does not mix DTensors with tensors
    that each rank holds whole: masks of weights, positions, ones.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(type(arg) is not Slab for arg in args) and _mixes((args, kwargs)):
            args, kwargs = tree_map(self._slab_of, (args, kwargs), is_leaf=is_operand)
        return func(*args, **kwargs)

    def _slab_of(self, leaf: Any) -> Any:
        return slab_of_weight(leaf, self._mesh) if is_cut(leaf) else leaf


def _mixes(arguments: Any) -> bool:
    """Whether cut weights are among plain tensors of more than one number, and no Slabs."""
    leaves = tree_leaves(arguments, is_leaf=is_operand)
    has_plain = any(isinstance(x, Tensor) and x.ndim and not isinstance(x, DTensor) for x in leaves)
    return has_plain and any(map(is_cut, leaves)) and not any(isinstance(x, Slab) for x in leaves)


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


def slab_of_weight(weight: DTensor, mesh: Mesh) -> Slab | Tensor:
    """The Slab of a cut weight: on ``mesh``, if it is cut there, else on the mesh where it is."""
    own = mesh if _is_on(weight, mesh) else mesh_of_device_mesh(weight.device_mesh)
    assert own is not None
    axes = weight.device_mesh.mesh_dim_names or ()
    if any(placement.is_partial() for placement in weight.placements):
        weight = weight.redistribute(placements=[Replicate()] * len(axes))
    sizes = tuple(weight.device_mesh.size(i) for i in range(len(axes)))
    layout = _layout(tuple(weight.shape), weight.placements, axes, sizes)
    local = _local(weight, own)
    return Slab(local, layout, own) if layout.split_dims else local


def _local(weight: DTensor, mesh: Mesh) -> Tensor:
    """This rank's part, whose gradient becomes that of one process."""
    if weight.requires_grad and torch.is_grad_enabled():
        return mean_of(weight, mesh)
    local: Tensor = weight.to_local()
    return local


def _is_on(weight: DTensor, mesh: Mesh) -> bool:
    axes = weight.device_mesh.mesh_dim_names or ()
    has_axes = all(axis in mesh.grid.long_axes for axis in axes)
    return has_axes and mesh.device_mesh(*axes) == weight.device_mesh


meetings.slab_of = lambda x, mesh: slab_of_weight(x, mesh) if is_cut(x) else x
meetings.localize_gradient = lambda x: x.full_tensor() if isinstance(x, DTensor) else x


@before_meetings
def on_one_mesh(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with Slabs for cut weights, and all Slabs on the mesh of the largest of them.

    That is the mesh of what is written into, where something is. Weights that are cut in another
    way are put together.
    """
    leaves = tree_leaves((args, kwargs), is_leaf=is_operand)
    slabs = [leaf for leaf in leaves if isinstance(leaf, Slab)]
    if not slabs or slabs[0].mesh.num_ranks == 1:
        return args, kwargs
    lead = max(slabs, key=Slab.numel)
    if args and writes_in_place(function, kwargs):
        written = slab_of_weight(args[0], lead.mesh) if is_cut(args[0]) else args[0]
        lead = written if isinstance(written, Slab) else lead

    def bring(leaf: Any) -> Any:
        if is_cut(leaf):
            weight = slab_of_weight(leaf, lead.mesh)
            if not _is_elsewhere(weight, lead):
                return weight
            whole = move(weight, lead.mesh, Layout.unsplit(weight.layout.shape))
            whole.local.copied_from = weight  # type: ignore[attr-defined]
            return whole
        if not _is_elsewhere(leaf, lead) or not leaf.mesh.is_sibling(lead.mesh):
            return leaf
        if leaf.layout.shape == lead.layout.shape:
            return move(leaf, lead.mesh, lead.layout)
        to = recut_over(leaf.layout, lead.mesh.grid, thin_ones_stay_whole=True)
        return move(leaf, lead.mesh, to)

    if all(not is_cut(leaf) and not _is_elsewhere(leaf, lead) for leaf in leaves):
        return args, kwargs
    brought: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
        bring, (args, kwargs), is_leaf=is_operand
    )
    return brought


def _is_elsewhere(leaf: Any, lead: Slab) -> TypeGuard[Slab]:
    return isinstance(leaf, Slab) and leaf.mesh.grid != lead.mesh.grid
