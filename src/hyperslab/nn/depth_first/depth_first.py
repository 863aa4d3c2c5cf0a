"""A chain of layers computed tile by tile, all of it for one tile before the next.

Of a chain such as convolution, activation and pool only the input is kept. Tensors between its
layers exist for one tile at a time, and are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

from hyperslab.comm.fetch import fetch
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, UnsupportedOp
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.kernels.tiles import autocast_as_now
from hyperslab.layout import ChainPlan, Layout, TileBoxes, plan_chain
from hyperslab.nn.call_signature import call_signature
from hyperslab.nn.depth_first import tile_pointwise as tile_pointwise, tile_windows as tile_windows
from hyperslab.nn.depth_first.memory_estimate import COUNTERS, MemoryCounter
from hyperslab.nn.depth_first.survey import Survey, survey
from hyperslab.nn.depth_first.tile_slab import NotHeldError, Tape, TileSlab, single_rank_slab
from hyperslab.nn.dispatch import materialise
from hyperslab.nn.module_snapshot import (
    ParameterSlots,
    TensorVersions,
    TrainingModes,
    plain_attributes,
)
from hyperslab.nn.parallel.outside_tensors import with_mean
from hyperslab.nn.single_rank.mode import active_mode
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.nn.trial_run import rng_states, same_draws, unjournaled
from hyperslab.torch_private import tree_leaves, tree_map

MOST_KEPT = 64
"""Shapes of inputs whose surveys are kept."""
TILE_NUMEL = 2**29
"""Elements of the largest tensor in a tile, unless others are asked for.

Beside an H200 the host took some 6 ms for a tile of two blocks of layers: with smaller tiles the
GPU waits for it (``benchmarks/gpu_depth.py``).
"""


@dataclass(frozen=True)
class Chain:
    """A module, or consecutive children of an ``nn.Sequential``, to be computed depth first."""

    name: str
    owner: nn.Module
    """The module itself, or the ``nn.Sequential``."""
    children: tuple[str, ...]
    """The names of the children; none for the module itself."""
    tile_numel: int = TILE_NUMEL

    @property
    def paths(self) -> list[str]:
        """The names of its parts in the network."""
        parent = self.name.rpartition(".")[0]
        return [f"{parent}.{child}".lstrip(".") for child in self.children] or [self.name]

    @property
    def parts(self) -> list[nn.Module]:
        return [self.owner.get_submodule(name) for name in self.children] or [self.owner]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for part in self.parts for module in part.modules()]


class DepthFirst:
    """What runs in the place of ``run``, which is that of ``chain``: tile by tile on Slabs."""

    def __init__(self, chain: Chain, run: Callable[..., Any], *, picked: bool = True) -> None:
        self._chain, self._run, self._is_named = chain, run, picked
        self._surveys: dict[object, Survey] = {}
        self.picked = picked
        """Whether it is computed depth first. Else it runs as if it was not here."""
        self.tile_numel = chain.tile_numel

    @property
    def name(self) -> str:
        return self._chain.name

    def can_run(self, input: Tensor) -> bool:
        """Whether tensors like ``input``, which needs no values, can be computed tile by tile."""
        modules = self._chain.modules
        if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
            return False  # they would be called for every tile
        with same_draws() as before:
            try:
                survey(self._run, single_rank_slab(input), modules)
            except Exception:  # noqa: BLE001 - with whatever it is, it runs layer by layer
                return False
            return rng_states() == before  # others would differ from tile to tile

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.picked and not COUNTERS:  # as most are, in every pass of the module
            return self._run(*args, **kwargs)
        if is_dynamo_compiling():
            return self._compiled(*args, **kwargs)
        if COUNTERS:
            return self._counted(COUNTERS[-1], args, kwargs)
        mode = active_mode()  # in which tensors are plain
        by_tiles = self._by_tiles if mode is None else mode.on_slabs(self._by_tiles)
        out = by_tiles(*args, **kwargs)
        return self._run(*args, **kwargs) if out is None else out

    def _by_tiles(self, *args: Any, **kwargs: Any) -> Slab | None:
        """The output; None where it is to be computed layer by layer, on all ranks."""
        leaves = tree_leaves((args, kwargs), is_leaf=is_slab)
        slabs = [leaf for leaf in leaves if isinstance(leaf, Slab)]
        if not slabs or 0 in slabs[0].shape:
            return None
        call = _Call(self._run, *_swapped((args, kwargs), slabs[0], _TILE))
        try:
            self._check(slabs, leaves)
            materialise(self._run, ())
            found = self._surveyed(slabs[0], call)
        except UnsupportedOp:
            if self._is_named:
                raise
            return None  # it has changed since it was picked
        return self._compute(slabs[0], call, found)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_named:  # else nobody asked for it, and a compiler saves memory by itself
            from hyperslab.nn.compile import refuse_compiling  # loads the compiler

            advice = "leave it out of depth_first, or compile modules without it"
            refuse_compiling(f"{self._chain.name}, a depth-first chain,", advice)
        return self._run(*args, **kwargs)

    def _counted(
        self, counter: MemoryCounter, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs it layer by layer, for an estimate of the memory that it takes."""
        if len(args) != 1 or not isinstance(args[0], Tensor):
            return self._run(*args, **kwargs)
        with counter.in_chain(self.name, args[0]) as run:
            out = self._run(*args, **kwargs)
        run.output = out if isinstance(out, Tensor) else None
        return out

    def _check(self, slabs: Sequence[Slab], leaves: Sequence[Any]) -> None:
        chain = f"{self._chain.name}, a depth-first chain,"
        if len(slabs) > 1 or any(isinstance(leaf, Tensor) for leaf in leaves):
            raise UnsupportedOp(
                f"{chain} takes one tensor and is given more: name a part of it in depth_first"
            )
        if 1 in slabs[0].layout.split_dims:
            raise UnsupportedOp(f"{chain} wants all channels: {slabs[0].layout.describe()}")

    def _compute(self, x: Slab, run: Callable[[TileSlab], Any], found: Survey) -> Slab:
        grid, rank = x.mesh.grid, x.mesh.rank
        plan = plan_chain(grid, rank, x.layout, found.route, self.tile_numel)
        window = fetch(x.local, plan.exchange, x.mesh)
        wants_input, *wants = found.reaches
        modules = self._chain.modules
        slots, autocast = ParameterSlots(modules), autocast_as_now(x.device)
        state = _state_of(modules, slots, wants)
        job = _Pass(
            *(self._chain.name, run, x.layout, x.mesh, found, plan, modules),
            *(slots, wants, autocast, TrainingModes(modules), state),
        )
        window = window if wants_input else window.detach()
        trained = with_mean(job.trained, x.mesh)
        local = _TileByTile.apply(job, window, *trained)  # type: ignore[no-untyped-call]
        return Slab(local, found.route.output, x.mesh)

    def _surveyed(self, x: Slab, call: _Call) -> Survey:
        """What ``survey`` finds; it takes milliseconds, so it is kept."""
        modules = self._chain.modules
        args, kwargs = _swapped((call.args, call.kwargs), _TILE, x)
        signature = call_signature(args, kwargs, x.device)
        specs = [(p.shape, p.dtype, p.requires_grad) for p in ParameterSlots(modules).parameters]
        key = signature, plain_attributes(modules), tuple(specs)
        if signature is None or not _has_hash(key):  # nobody can tell whether it has changed
            return self._survey(x, call)
        if key not in self._surveys:
            if len(self._surveys) == MOST_KEPT:
                self._surveys.clear()
            self._surveys[key] = self._survey(x, call)
        return self._surveys[key]

    def _survey(self, x: Slab, run: Callable[[TileSlab], Any]) -> Survey:
        try:
            return survey(run, x, self._chain.modules)
        except UnsupportedOp as refusal:
            name = self._chain.name
            raise UnsupportedOp(f"{name}, a depth-first chain: {refusal}") from refusal


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _state_of(
    modules: Sequence[nn.Module], slots: ParameterSlots, wants: Sequence[bool]
) -> tuple[object, TensorVersions]:
    """What layers depend on besides their inputs and the weights that autograd watches.

    Two of them are equal if nothing has changed between.
    """
    pairs = zip(slots.parameters, wants, strict=True)
    frozen = [parameter for parameter, is_wanted in pairs if not is_wanted]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    return plain_attributes(modules, modes=False), TensorVersions((*frozen, *buffers))


_TILE = object()
"""The place of the tile among the arguments of a call."""


@dataclass(frozen=True)
class _Call:
    """A call that is repeated for every tile; it does not keep the Slab it came from."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, tile: TileSlab) -> Any:
        args, kwargs = _swapped((self.args, self.kwargs), _TILE, tile)
        return self.run(*args, **kwargs)


def _swapped(tree: Any, old: object, new: object) -> Any:
    return tree_map(lambda leaf: new if leaf is old else leaf, tree, is_leaf=is_slab)


@dataclass(frozen=True)
class _Pass:
    """One forward pass through a chain, and all that its backward pass needs besides tensors."""

    name: str
    run: Callable[[TileSlab], Any]
    source: Layout
    mesh: Mesh
    survey: Survey
    plan: ChainPlan
    modules: Sequence[nn.Module]
    slots: ParameterSlots
    wants: Sequence[bool]
    """Whether each of the weights gets a gradient."""
    autocast: Callable[[], AbstractContextManager[Any]]
    modes: TrainingModes
    state: tuple[object, TensorVersions]
    """Of the modules in the forward pass."""

    def check_unchanged(self) -> None:
        """Before layers are computed again."""
        now = _state_of(self.modules, ParameterSlots(self.modules), self.wants)
        if now != self.state:
            raise UnsupportedOp(
                f"{self.name}, a depth-first chain, is computed again in the backward pass, and "
                "since its forward pass an attribute, a buffer or a frozen weight in it was "
                "changed: change it after the backward pass, or take the chain out of depth_first"
            )

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p, wants in zip(self.slots.parameters, self.wants, strict=True) if wants]

    def with_trained(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """All weights, with ``leaves`` in the place of those that get gradients."""
        rest = iter(leaves)
        pairs = zip(self.slots.parameters, self.wants, strict=True)
        return [next(rest) if wants else p for p, wants in pairs]

    def compute(self, piece: Tensor, tile: TileBoxes) -> Tensor:
        """The outputs of ``tile``, of the ``piece`` of the input that they read."""
        tape = Tape(self.source, self.survey.route.needs(tile.outputs))
        with self.autocast(), unjournaled():
            try:
                out = self.run(TileSlab(piece, tile.reads, self.source, self.mesh, tape))
                if out.whole != self.survey.route.output:
                    raise NotHeldError
                return out.part(tile.outputs).local  # type: ignore[no-any-return]
            except NotHeldError:
                raise ConfigError(
                    f"{self.name}, a depth-first chain, does something else than when it first got "
                    f"a tensor of this shape, and made {self.survey.route.output.shape} of it: "
                    "what it does must depend on its modules' attributes and its arguments alone"
                ) from None

    def compute_again(self, leaves: Sequence[Tensor], piece: Tensor, tile: TileBoxes) -> Tensor:
        """As ``compute``, in a graph from ``leaves`` in the place of weights that get gradients."""
        weights = self.slots.replaced(self.with_trained(leaves))
        with torch.enable_grad(), weights, self.modes.again():
            return self.compute(piece, tile)

    def differentiate(
        self, out: Tensor, wanted: Sequence[Tensor], grad: Tensor
    ) -> Sequence[Tensor | None]:
        again = torch.is_grad_enabled()
        try:
            return torch.autograd.grad(out, wanted, grad, create_graph=again, allow_unused=True)
        except NotHeldError:
            raise UnsupportedOp(
                f"{self.name}, a depth-first chain, has activation checkpointing inside: leave it "
                "out, as the chain keeps nothing but its input anyway"
            ) from None

    def empty_output(self, like: Tensor) -> Tensor:
        """Room for all outputs of this rank, laid out as the first tile is."""
        memory_format = memory_format_of(like) if self.plan.tiles else self.survey.memory_format
        shape, dtype = self.plan.outputs.shape, self.survey.dtype
        return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format)


class _TileByTile(Function):
    """The outputs of a chain on this rank, whose inputs it holds."""

    @staticmethod
    def forward(ctx: Any, job: _Pass, window: Tensor, *weights: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(window, *weights)
        plan, out = job.plan, None
        for tile in plan.tiles:
            made = job.compute(window[tile.reads.slices_in(plan.exchange.wanted)], tile)
            out = job.empty_output(made) if out is None else out
            out[tile.outputs.slices_in(plan.outputs)] = made
            del made  # before the next is made
        return job.empty_output(window) if out is None else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the tiles, added up. They have a graph if one is asked for."""
        job: _Pass = ctx.job
        job.check_unchanged()
        window, *weights = ctx.saved_tensors
        wants_window = ctx.needs_input_grad[1]
        grad_window = torch.zeros_like(window) if wants_window else None
        sums = [torch.zeros_like(w, dtype=_wide(w.dtype)) for w in weights]
        leaves = [_leaf(w) for w in weights]
        for tile in job.plan.tiles:
            where = tile.reads.slices_in(job.plan.exchange.wanted)
            piece = _leaf(window[where]) if wants_window else window[where]
            out = job.compute_again(leaves, piece, tile)
            wanted = [*([piece] if wants_window else []), *leaves]
            found = job.differentiate(out, wanted, grad[tile.outputs.slices_in(job.plan.outputs)])
            if grad_window is not None:
                _add(grad_window[where], found[0])
            for total, part in zip(sums, found[len(found) - len(sums) :], strict=True):
                _add(total, part)
        return None, grad_window, *(t.to(w.dtype) for t, w in zip(sums, weights, strict=True))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _leaf(x: Tensor) -> Tensor:
    """``x`` to differentiate by; in a graph of gradients it stays connected."""
    return x.view_as(x) if torch.is_grad_enabled() else x.detach().requires_grad_()


def _add(total: Tensor, part: Tensor | None) -> None:
    if part is not None:
        total.add_(part)
