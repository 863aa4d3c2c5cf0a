"""Another cut of the same ranks for each part of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES, recut_over
from hyperslab.nn.parallel.cut_weights import ModuleCut
from hyperslab.nn.placement import move
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_map

Plan = Mapping[str, Mapping[str, int | str]]
"""By patterns of names of modules: how many ranks there are along each axis, and ``split``."""

SPLITS = ("filter", "channel", "blocks")


def read_plan(plan: Plan, module: nn.Module, mesh: Mesh) -> dict[str, ModuleCut]:
    """The cuts of the modules that ``plan`` names; of two patterns for one the later counts.

    Every rank reads the same plan, and all raise alike.
    """
    if not isinstance(plan, Mapping):
        raise ConfigError(f"plan maps names of modules to cuts, got {type(plan).__name__}")
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, ModuleCut] = {}
    for pattern, cut in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ConfigError(f"plan: no module is named {pattern!r}; there are {known}")
        try:
            found.update(dict.fromkeys(matching, _read_cut(cut, mesh)))
        except ConfigError as error:
            raise ConfigError(f"plan of {pattern!r}: {error}") from None
    return found


def _read_cut(cut: Mapping[str, Any], mesh: Mesh) -> ModuleCut:
    if not isinstance(cut, Mapping):
        raise ConfigError(f"a cut is a table such as {{'depth': 4}}, got {cut!r}")
    axes = {name: size for name, size in cut.items() if name != "split"}
    split = cut.get("split")
    if unknown := sorted(axes.keys() - set(AXES)):
        raise ConfigError(f"there is no axis {unknown[0]!r}: the axes are {', '.join(AXES)}")
    if split is not None and split not in SPLITS:
        raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return ModuleCut(mesh.recut(axes) if axes else mesh, split)


def cuts_by_name(cuts: Mapping[str, ModuleCut], mesh: Mesh) -> Callable[[str], ModuleCut]:
    """Gives the cut of any part of a module: its own, or that of the nearest part around it."""

    def find(name: str) -> ModuleCut:
        while name:
            if name in cuts:
                return cuts[name]
            name = name.rpartition(".")[0]
        return ModuleCut(mesh)

    return find


def install_plan(cuts: Mapping[str, ModuleCut], module: nn.Module) -> None:
    """Has each of the modules find its inputs on its own mesh."""
    parts = dict(module.named_modules())
    for name, cut in cuts.items():
        hook = partial(_recut_inputs, mesh=cut.mesh)
        parts[name].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        parts[name].__dict__["_hyperslab_cut"] = cut


def _recut_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: Mesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if is_dynamo_compiling():
        from hyperslab.nn.compile import refuse_compiling  # loads the compiler

        refuse_compiling("a module with a plan", "use it as it is, or leave the plan out")

    def bring(leaf: Any) -> Any:
        if not isinstance(leaf, Slab) or leaf.mesh.grid == mesh.grid:
            return leaf
        return move(leaf, mesh, recut_over(leaf.layout, mesh.grid))

    brought: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
        bring, (args, kwargs), is_leaf=is_slab
    )
    return brought
