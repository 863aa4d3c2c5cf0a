"""Chains that are computed depth first where memory is short, picked when sizes are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import nn

from hyperslab.comm.collectives import reduce_min
from hyperslab.comm.mesh import Mesh
from hyperslab.nn.depth_first.depth_first import TILE_NUMEL, DepthFirst
from hyperslab.nn.depth_first.memory_estimate import MemoryEstimate, estimate_memory
from hyperslab.nn.slab import ONLY_SLABS, Slab, is_slab
from hyperslab.partial import shown_nbytes
from hyperslab.torch_private import tree_leaves

_log = logging.getLogger("hyperslab")

MARGIN = 1.1
"""How much more than what tensors take must be free: for workspaces, and gaps between tensors."""
MAX_GROWTH = 1 << 12
"""A step keeps at most as many times its inputs: where more is free, nothing is counted."""
PER_WEIGHT = 4
"""A weight's gradient, its place in a message, and two numbers of an optimizer."""


TILES = (TILE_NUMEL, TILE_NUMEL // 4, TILE_NUMEL // 32)
"""Elements of the largest tensor in a tile: smaller ones, which take longer, if they must be."""
Tiles = Mapping[str, int]
"""Chains, and the elements of the largest tensor in each one's tiles."""


class MemoryWatch:
    """Looks at the memory that training steps of a module need before the first of each size."""

    def __init__(
        self, module: nn.Module, run: Callable[..., Any], mesh: Mesh, chains: Sequence[DepthFirst]
    ) -> None:
        """``run`` is the forward pass; ``chains`` are those that may be computed depth first."""
        self._module, self._run, self._mesh, self._chains = module, run, mesh, chains
        self._largest: dict[object, int] = {}
        """The elements of the largest inputs so far; smaller ones fit where they did."""
        self._like: object = None
        """Dtypes and shapes of the last step's inputs: there is nothing to pick for the same."""

    def before(self, args: Any, kwargs: Any) -> None:
        """Picks chains for a step on these arguments, if it is one and the largest so far.

        Collective over all ranks.
        """
        if not self._module.training or not torch.is_grad_enabled():
            return
        slabs: Sequence[Slab] = args
        if kwargs or {*map(type, args)} != ONLY_SLABS:
            leaves = tree_leaves((args, kwargs), is_leaf=is_slab)
            slabs = [leaf for leaf in leaves if isinstance(leaf, Slab)]
        autocasts = torch.is_autocast_enabled(self._mesh.device.type)
        like = autocasts, [(slab.local.dtype, slab.layout.shape) for slab in slabs]
        if like == self._like:
            return
        self._like = like
        key = autocasts, *((slab.dtype, slab.ndim) for slab in slabs)
        numel = sum(slab.numel() for slab in slabs)
        if numel > self._largest.get(key, 0):
            self._largest[key] = numel
            self._look(args, kwargs, max(slabs, key=Slab.numel))

    def _look(self, args: Any, kwargs: Any, largest: Slab) -> None:
        numbers = free_bytes(self._mesh.device) or 0, -largest.local.numel()
        free, piece = reduce_min("comparing free memory", numbers, self._mesh)
        if -piece * largest.local.itemsize * MAX_GROWTH <= free:
            return
        estimate = self._estimate(args, kwargs)
        chains = [] if estimate is None else self._usable(estimate)
        traits = (
            None if estimate is None else [(c.passing, *c.keeps.values()) for c in estimate.calls]
        )
        digest = crc32(repr((traits, [chain.name for chain in chains])).encode())
        least = reduce_min("comparing what a step keeps", (digest, -digest), self._mesh)
        if estimate is not None and least[0] == -least[1]:  # all ranks found the same
            self._pick(estimate, chains, free, -piece / largest.numel())

    def _estimate(self, args: Any, kwargs: Any) -> MemoryEstimate | None:
        try:
            return estimate_memory(self._run, args, kwargs, self._module, self._mesh.device)
        except Exception as error:  # noqa: BLE001 - what fails without values may well run with them
            _log.debug("the memory of a step is not known: %s", error)
            return None

    def _usable(self, estimate: MemoryEstimate) -> list[DepthFirst]:
        """The chains that can be computed tile by tile, those with most between layers first."""
        inputs = {run.chain: run.input for run in estimate.chain_runs}
        sizes = {name: estimate.within(name) for name in inputs}
        found = [
            chain
            for chain in self._chains
            if chain.name in inputs and chain.can_run(inputs[chain.name])
        ]
        return sorted(found, key=lambda chain: -sizes[chain.name])

    def _pick(
        self, estimate: MemoryEstimate, chains: Sequence[DepthFirst], free: int, share: float
    ) -> None:
        def needs(tiles: Tiles) -> float:
            return MARGIN * estimate.peak(tiles, share) + self._weight_bytes

        now = {chain.name: chain.tile_numel for chain in chains if chain.picked}
        names = [chain.name for chain in chains]
        for numel in TILES:
            plan = _fewest(names, now, numel, needs, free)
            if needs(plan) <= free:
                break
        for chain in chains:
            if chain.name in plan:
                chain.picked, chain.tile_numel = True, plan[chain.name]
        self._tell([name for name in plan if name not in now], needs(now), needs(plan), free)

    @property
    def _weight_bytes(self) -> int:
        trained = [p for p in self._module.parameters() if p.requires_grad]
        return PER_WEIGHT * sum(p.numel() * p.element_size() for p in trained)

    def _tell(self, names: Sequence[str], before: float, after: float, free: int) -> None:
        if self._mesh.rank:
            return
        if names:
            _log.info(
                "memory is short: a training step would take about %s more and %s are free, so "
                "%s will be computed depth first, which takes about %s",
                *(shown_nbytes(before), shown_nbytes(free), ", ".join(names), shown_nbytes(after)),
            )
        if after > free:
            _log.warning(
                "a training step takes about %s more, and %s are free: split samples over more "
                "ranks (depth, height, width), or see 'When memory is short' in the documentation",
                *(shown_nbytes(after), shown_nbytes(free)),
            )


def _fewest(
    names: Sequence[str], now: Tiles, numel: int, needs: Callable[[Tiles], float], free: int
) -> Tiles:
    """The first of ``names``, and what is picked ``now``, until all fits; none that helps nothing.

    Tiles have ``numel`` elements.
    """
    plan = dict(now)
    for name in names:
        if needs(plan) > free:
            plan.setdefault(name, numel)
    for name in [name for name in reversed(plan) if name not in now]:
        rest = {each: numel for each, numel in plan.items() if each != name}
        if needs(rest) <= max(free, needs(plan)):
            plan = rest
    return plan


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a GPU; None on CPUs, which nobody needs to ask."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
