"""Any module, on any mesh."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hyperslab.comm.agree import agree_on
from hyperslab.comm.collectives import broadcast_
from hyperslab.comm.failure_report import contact
from hyperslab.comm.mesh import Mesh, check_mesh, one_thread
from hyperslab.errors import ConfigError
from hyperslab.nn.cuda_graphs.graphed import AUTO as GRAPHS_AUTO, Graphed, can_record
from hyperslab.nn.cuda_graphs.recorder import CudaRecorder
from hyperslab.nn.cuda_graphs.worth import CudaMeter
from hyperslab.nn.depth_first import memory_watch
from hyperslab.nn.depth_first.chains import (
    AUTO,
    DepthFirstNames,
    find_chains,
    install_candidates,
    install_chains,
    installed_chains,
)
from hyperslab.nn.depth_first.memory_watch import MemoryWatch
from hyperslab.nn.dispatch import meetings
from hyperslab.nn.outputs import check_computed
from hyperslab.nn.parallel.checks import (
    BackwardHooks,
    Comparisons,
    add_module_path,
    check_layers,
    check_tensors,
)
from hyperslab.nn.parallel.cut_weights import PlainWhole, cut_weights, is_cut
from hyperslab.nn.parallel.gradient_averaging import Replica
from hyperslab.nn.parallel.meta_weights import give_values, meta_parts
from hyperslab.nn.parallel.outside_tensors import leave_to_fsdp
from hyperslab.nn.parallel.plan import Plan, cuts_by_name, install_plan, read_plan
from hyperslab.nn.parallel.whole_weights import load_whole_weights
from hyperslab.nn.pass_spans import follow_backward, forward_pass
from hyperslab.nn.plain_random import PlainDraws
from hyperslab.nn.single_rank.mode import SingleRank
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import change_class, patch_item, tree_map

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module,
    mesh: Mesh,
    *,
    shard_weights: bool = False,
    batch_stats: str = "global",
    depth_first: DepthFirstNames = AUTO,
    cuda_graphs: bool | str = False,
    plan: Plan | None = None,
) -> Module:
    """``module`` itself, ready to run on Slabs: ``forward`` is unchanged, gradients are averaged.

    Weights are whole on every rank and their gradients averaged while the backward pass runs; with
    ``shard_weights`` FSDP2 spreads both. ``batch_stats="spatial"`` computes BatchNorm's statistics
    over the ranks that share a sample rather than over the global batch, as DDP users expect; its
    buffers are then those of rank 0. Weights, buffers and torch's random state (dropout masks come
    from it) become those of rank 0. Keys of ``state_dict`` stay.

    Modules named in ``depth_first`` (``"block1"``, or ``"features.0-2"`` for consecutive children
    of an ``nn.Sequential``), such as convolution, activation and pool, are computed tile by tile:
    each tile goes through the whole of the module before the next, only the module's input is
    kept, and the backward pass computes the rest again. The result is the same. A mapping from
    names to numbers says how many elements the largest tensor in a tile may have, about 2**29 by
    default. They cannot be compiled, and hooks of modules inside them run once for every tile.

    ``"auto"`` picks such modules where memory is short. Before the first training step on inputs
    larger than any before, on a GPU, ``forward`` runs once on tensors without values, without Slabs
    and hooks, to count what the step will keep; chains are picked, the largest first, if that is
    more than what is free on some rank, and a line in the log says so. It is the default because
    results do not change but to rounding, where memory suffices nothing is done, and where it does
    not the step would have failed. Modules with BatchNorm or dropout inside, those with hooks, and
    networks with ``shard_weights`` are left as they are; ``()`` does without it.

    On one rank ``forward`` runs on plain tensors, as if it was not parallel. Large tensors are cut
    into tiles and fused kernels serve there too, and random numbers are those of any mesh.

    With ``cuda_graphs``, on GPUs, passes are recorded in CUDA graphs and replayed, so that a GPU
    does not wait for the host: for each signature (shapes, dtypes, memory formats), the second pass
    records and later ones replay. On several ranks that needs ``init(transport="device")``, and
    exchanges between them are part of it. Outputs, gradients and random numbers
    are the same; Python code of ``forward`` no longer runs. Passes that cannot be recorded run as
    ever, and a line in the log says why: the host waits for the GPU in them (``item()``, indices
    by masks), parts of the module have hooks or are computed depth first, attributes change.
    Between a forward pass and its backward pass, a second forward pass runs as ever, and one
    forward pass can have one backward pass. On CPUs it does nothing.

    ``cuda_graphs="auto"`` records where that is worth it: the host takes at least half as long as
    the GPU for a forward pass, whose activations fit twice into free memory, and no backward pass
    so far was one of several of its forward pass, or made a gradient of a gradient. Else passes run
    as ever, and a line in the log (of level INFO) says why. If only later passes do such things,
    they raise as with ``True``.

    Where the mesh has a ``channel`` axis, weights are cut along filters or channels, whichever
    moves fewer bytes, and are DTensors; the optimizer is made afterwards. ``plan`` gives some
    modules, named by patterns, another cut of the same ranks: ``{"features.0": {"depth": 4},
    "head.*": {"channel": 2, "depth": 2}}``. Their inputs are re-cut, and modules without a plan go
    on as their input comes. ``sample``, left out, takes the ranks that remain. ``split`` in a cut
    is ``"filter"`` (the input is gathered, filters are kept), ``"channel"`` (channels are kept, the
    output is scattered) or ``"blocks"`` (dense layers are cut into rows x columns over channel and
    one other axis).

    A module made on the meta device gets its weights here, each rank its own part of them, by
    ``reset_parameters``; the numbers are the same on any mesh.

    A module that FSDP2's ``fully_shard`` was applied to, over all ranks (on a mesh of one dim, or
    two for HSDP), keeps what it was given there.

    Collective over the mesh.
    """
    _check(module, mesh, batch_stats)
    if cuda_graphs not in (True, False, GRAPHS_AUTO):
        raise ConfigError(f"cuda_graphs must be True, False or 'auto', got {cuda_graphs!r}")
    if mesh.batch_stats != batch_stats:
        mesh = replace(mesh, batch_stats=batch_stats)
    cuts = read_plan(plan or {}, module, mesh)
    chains = find_chains(module, depth_first)
    sharded = _is_sharded(module, mesh)
    if cuts:
        _check_goes_with_plan(by_fsdp=shard_weights or sharded, has_chains=bool(chains))
    empty = meta_parts(module)
    module._apply(partial(_to_device, device=mesh.device))  # type: ignore[no-untyped-call]
    named = depth_first == AUTO or [(chain.name, chain.tile_numel) for chain in chains]
    planned = [(name, cut.mesh.grid.sizes, cut.split) for name, cut in cuts.items()]
    traits = shard_weights, batch_stats, named, cuda_graphs, planned, _traits(module)
    agree_on("the module given to parallelize", traits, mesh)
    shard_weights = shard_weights and bool(mesh.axes_beside(["channel"]))
    weights = [] if sharded else module.parameters()
    known = [tensor for tensor in (*weights, *module.buffers()) if not tensor.is_meta]
    broadcast_(known, mesh, "copying the weights of rank 0")
    _share_random_state(mesh)
    if not sharded and mesh.num_ranks > 1:
        has_cuts = cut_weights(module, cuts_by_name(cuts, mesh))
        meetings.exist |= has_cuts or bool(cuts)
        install_plan(cuts, module)
    give_values(empty, mesh)
    BackwardHooks(module, mesh).warn()
    install_chains(chains)
    is_spread = sharded or shard_weights or bool(cuts)
    if depth_first == AUTO and not is_spread and _can_watch_memory(mesh):
        install_candidates(module)
    if sharded:
        _guard_views(module)
        leave_to_fsdp(module)
    elif shard_weights:
        leave_to_fsdp(module)
        _shard_weights(
            module, mesh, {part for chain in chains if chain.children for part in chain.parts}
        )
    load_whole_weights(module)
    if any(isinstance(weight, DTensor) for weight in module.parameters()):
        meetings.with_spread_weights = True
        patch_item()
    replicated = mesh.num_ranks > 1 and not shard_weights and not sharded
    _become_parallel(module, mesh, replicated=replicated, cuda_graphs=cuda_graphs)
    return module


@dataclass(frozen=True, slots=True)
class _State:
    """What ``parallelize`` adds to a module, under one name that no class will use."""

    mesh: Mesh
    cls: type[nn.Module]
    """The module's class before."""
    patch: Callable[..., Any] | None
    """A ``forward`` of the instance rather than of its class, if it had one."""
    run: Callable[..., Any]
    """What ``forward`` calls."""
    comparisons: Comparisons
    hooks: BackwardHooks
    memory: MemoryWatch | None
    """What picks modules to compute depth first; None where there are none to pick from."""
    cuda_graphs: bool | str
    """Whether passes are to be recorded."""


class Parallel:
    """What ``parallelize`` adds to a module's class, as FSDP2 adds to it."""

    _hyperslab: _State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._hyperslab
        mesh = state.mesh
        if kwargs or [arg for arg in args if type(arg) is not Slab or arg.mesh is not mesh]:
            args, kwargs = tree_map(self._on_mesh, (args, kwargs), is_leaf=is_slab)
        if is_dynamo_compiling():
            from hyperslab.nn import compile as compile  # loads what Dynamo must know

            return state.run(*args, **kwargs)
        if mesh.backend is None:
            return _run(self, state, args, kwargs)  # type: ignore[arg-type]
        with one_thread(mesh):
            return _run(self, state, args, kwargs)  # type: ignore[arg-type]

    def _on_mesh(self, leaf: Any) -> Any:
        """A Slab argument with this module's settings, which travel with it to every layer."""
        if not isinstance(leaf, Slab):
            return leaf
        mesh = self._hyperslab.mesh
        if leaf.mesh is mesh:
            return leaf
        if leaf.mesh.grid != mesh.grid:
            raise ConfigError(
                f"the module was parallelized on a mesh of {mesh.grid.describe()} and is given a "
                f"Slab on {leaf.mesh.grid.describe()}: use one mesh for both"
            )
        return leaf.on(mesh)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients accumulate on each rank and are not yet averaged.

        The first backward pass of a later forward pass averages all that has been added up.
        """
        run = self._hyperslab.run
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(False)
        try:
            with run.no_sync() if isinstance(run, Replica) else nullcontext():
                yield
        finally:
            if isinstance(self, FSDPModule):
                self.set_requires_gradient_sync(True)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """``to``, ``float`` and the like, which would take hooks away from weights that are cut."""
        cut = [weight for weight in self.parameters() if is_cut(weight)]  # type: ignore[attr-defined]
        if not cut:
            return super()._apply(fn, recurse)  # type: ignore[misc, no-any-return]
        if any(fn(weight) is not weight for weight in cut):
            raise ConfigError(
                "weights that are cut over ranks keep their dtype, device and memory format: "
                "convert the module before parallelize"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that is parallel on the same mesh, such as one that averages weights."""
        if isinstance(self, FSDPModule):
            raise ConfigError(
                "a module whose weights are sharded cannot be copied: make a second module and "
                "load its state_dict"
            )
        state = self._hyperslab
        with _plain(self) as plain:
            twin = copy.deepcopy(plain, memo)
        twin.zero_grad()  # those of DTensors are copied, those of plain weights are not
        replicated = isinstance(state.run, Replica)
        _become_parallel(twin, state.mesh, replicated=replicated, cuda_graphs=state.cuda_graphs)
        return twin  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            "a parallelized module cannot be pickled: save its state_dict(), whose keys are those "
            "of the plain module"
        )


def _run(module: nn.Module, state: _State, args: Any, kwargs: Any) -> Any:
    """A forward pass, which all ranks run; one rank may run it by itself on plain tensors."""
    if any(state.hooks.tables):
        state.hooks.warn((args, kwargs))
    if state.memory is not None:
        state.memory.before(args, kwargs)
    if state.mesh.backend is not None:
        state.comparisons.begin()
    try:
        with PlainDraws(state.mesh), forward_pass(module, state.mesh.device):
            out = state.run(*args, **kwargs)
        follow_backward(out, state.mesh.device)
        if type(out) is not Slab:
            check_computed(out)
    except Exception as error:
        add_module_path(error, module)
        raise
    if state.mesh.backend is None:  # there is nobody to compare with
        return out
    is_on_slabs = state.comparisons.is_on_slabs
    state.comparisons.post()
    if is_on_slabs and state.mesh.batch_stats == "spatial" and module.training:
        broadcast_(module.buffers(), state.mesh, "copying the buffers of rank 0")
    return out


def _check(module: nn.Module, mesh: Mesh, batch_stats: str) -> None:
    if batch_stats not in ("global", "spatial"):
        raise ConfigError(f"batch_stats must be 'global' or 'spatial', got {batch_stats!r}")
    if not isinstance(module, nn.Module):
        raise ConfigError(f"parallelize takes a torch.nn.Module, got {type(module).__name__}")
    check_mesh(mesh)
    if isinstance(module, Parallel):
        raise ConfigError("the module is parallelized already")
    for name, child in module.named_modules():
        if isinstance(child, Parallel):
            raise ConfigError(f"{name}, a part of the module, is parallelized already")
    check_tensors(module)
    check_layers(module, mesh)


def _check_goes_with_plan(*, by_fsdp: bool, has_chains: bool) -> None:
    """Raises where something wants one mesh for all parts of a module."""
    if by_fsdp:
        raise ConfigError(
            "plan and shard_weights cannot be given together, nor fully_shard be applied before: "
            "FSDP2 wants one mesh for all weights"
        )
    if has_chains:
        raise ConfigError(
            "plan and depth_first cannot be given together: the parts of a chain stay on one mesh"
        )


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(device)


def _can_watch_memory(mesh: Mesh) -> bool:
    """Whether free memory is known, and channels are whole, as depth-first chains want them."""
    is_known = memory_watch.free_bytes(mesh.device) is not None
    return is_known and mesh.grid.size("channel") == 1


def _become_parallel(
    module: nn.Module, mesh: Mesh, *, replicated: bool, cuda_graphs: bool | str
) -> None:
    """Gives ``module`` a class of its own that adds ``Parallel`` to it.

    What it adds is kept out of the module tree, so that it shows in no ``state_dict``.
    """
    chains = installed_chains(module)
    candidates = [chain for chain in chains if not chain.picked]
    cls, forward, patch = type(module), module.forward, module.__dict__.pop("forward", None)
    comparisons = Comparisons(mesh)
    run: Callable[..., Any] = forward
    if any(is_cut(weight) for weight in module.parameters()):
        run = PlainWhole(module, forward, mesh)
    if mesh.backend is None:
        run = SingleRank(module, forward, mesh)
    replica = Replica(module, run, mesh, comparisons) if replicated else None
    is_auto = cuda_graphs == GRAPHS_AUTO
    if cuda_graphs and can_record(mesh, logging.INFO if is_auto else logging.WARNING):
        meter = partial(CudaMeter, mesh.device) if is_auto else None
        run = Graphed(module, run, mesh, chains, CudaRecorder(mesh.device), replica, meter)
    if replica is not None:
        replica.forward, run = run, replica
    hooks = BackwardHooks(module, mesh)
    memory = MemoryWatch(module, forward, mesh, candidates) if candidates else None
    state = _State(mesh, cls, patch, run, comparisons, hooks, memory, cuda_graphs)
    module.__dict__["_hyperslab"] = state
    change_class(module, type(f"Parallel{cls.__name__}", (Parallel, cls), {}))


@contextmanager
def _plain(module: Any) -> Iterator[nn.Module]:
    """Within it, ``module`` is as it was before it became parallel."""
    parallel, state = type(module), module.__dict__.pop("_hyperslab")
    change_class(module, state.cls)
    if state.patch is not None:
        module.__dict__["forward"] = state.patch
    try:
        yield module
    finally:
        module.__dict__.pop("forward", None)
        change_class(module, parallel)
        module.__dict__["_hyperslab"] = state


def _traits(module: nn.Module) -> list[tuple[object, ...]]:
    """What must be the same on every rank."""
    layers = [(name, type(layer).__name__) for name, layer in module.named_modules()]
    tensors = (*module.named_parameters(), *module.named_buffers())
    return layers + [
        (name, tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for name, x in tensors
    ]


def _share_random_state(mesh: Mesh) -> None:
    if mesh.num_ranks == 1:
        return
    on_gpu = mesh.device.type == "cuda"
    state = [torch.get_rng_state(), *([torch.cuda.get_rng_state(mesh.device)] if on_gpu else [])]
    first = [part.clone() for part in state]
    broadcast_(first, mesh, "copying the random state of rank 0")
    changed = torch.tensor([int(not all(map(torch.equal, state, first)))])
    with contact("comparing random states", mesh):
        dist.all_reduce(changed, group=mesh.group)
    torch.set_rng_state(first[0])
    if on_gpu:
        torch.cuda.set_rng_state(first[1], mesh.device)
    if int(changed) and mesh.rank == 0:
        warnings.warn(
            f"torch's random state differed on {int(changed)} of {mesh.num_ranks} ranks and is now "
            "that of rank 0 on all, because masks of dropout must agree: seed all ranks alike",
            stacklevel=3,
        )


def _shard_weights(module: nn.Module, mesh: Mesh, chained: Collection[nn.Module]) -> None:
    """Spreads each layer's weights over all ranks, and what is left of the module's own.

    Weights that are cut along channels are spread over the ranks that hold the same of them.

    FSDP wants weights that several layers share in one unit: there it is the whole module. So are
    the ``chained`` layers, which run once a tile and must not gather their weights each time.
    """
    over = _mesh_for_fsdp(mesh)
    layers = [layer for layer in _layers(module) if layer not in chained]
    inside = {m for layer in layers for m in layer.modules()}
    own = [p for m in module.modules() if m not in inside for p in m.parameters(recurse=False)]
    uses = Counter(map(id, [*own, *(p for layer in layers for p in layer.parameters())]))
    for layer in layers:
        parameters = [*layer.parameters()]
        if parameters and all(uses[id(p)] == 1 for p in parameters):
            layer.register_forward_hook(_without_views)
            fully_shard(layer, mesh=over)
    module.register_forward_hook(_without_views)
    fully_shard(module, mesh=over)


def _mesh_for_fsdp(mesh: Mesh) -> DeviceMesh:
    """The ranks over which FSDP2 spreads weights, in one row."""
    if mesh.grid.size("channel") == 1:
        return init_device_mesh(mesh.device.type, (mesh.num_ranks,))
    axes = mesh.axes_beside(["channel"])
    over = mesh.device_mesh(*axes)  # of the mesh that cuts channels, as FSDP2 wants it
    return over if len(axes) == 1 else over._flatten("_x_".join(axes))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """What ``module`` calls: its children, and those of lists and dicts among them."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _layers(child)
        else:
            yield child


def _is_sharded(module: nn.Module, mesh: Mesh) -> bool:
    """Whether ``fully_shard`` spread the weights before: all of them, and over all ranks."""
    over = {
        name: weight.device_mesh.size() if isinstance(weight, DTensor) else None
        for name, weight in module.named_parameters()
    }
    if not any(over.values()):
        return False
    for name, num_ranks in over.items():
        if num_ranks != mesh.num_ranks:
            spread = f"spread over {num_ranks} ranks" if num_ranks else "whole on every rank"
            raise ConfigError(
                f"{name} is {spread}, while other weights are DTensors and the mesh has "
                f"{mesh.num_ranks} ranks: apply fully_shard to the whole module, last to itself, "
                "over all ranks, or to no part of it (parallelize(..., shard_weights=True) does it)"
            )
    return True


def _guard_views(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.register_forward_hook(_without_views, prepend=True)


def _without_views(module: nn.Module, args: object, out: Any) -> Any:
    """``out`` with pieces of their own: FSDP loses track of a view that is changed in place.

    Rules crop what they compute, so that a Slab can hold a view where a plain tensor would not.
    """
    return tree_map(_own, out, is_leaf=is_slab)


def _own(leaf: Any) -> Any:
    is_view = isinstance(leaf, Slab) and leaf.requires_grad and leaf.local._base is not None
    return leaf.with_local(leaf.local.clone()) if is_view else leaf
