"""Which modules of a network are computed depth first, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import conv, padding, pooling

from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.nn.depth_first.depth_first import TILE_NUMEL, Chain, DepthFirst

AUTO = "auto"
DepthFirstNames = Sequence[str] | Mapping[str, int] | None
"""Names of chains, with the elements of the largest tensor in a tile where not left to us.

``AUTO`` leaves the choice to us, too.
"""


def find_chains(module: nn.Module, names: DepthFirstNames) -> list[Chain]:
    """The chains of ``module`` with these ``names``: ``block1``, or ``features.0-2`` for three."""
    if names == AUTO:
        return []
    if isinstance(names, str):
        raise ConfigError(
            f"depth_first is a list of names, or 'auto', got {names!r}: write [{names!r}]"
        )
    if not isinstance(names, Sequence | Mapping | None):
        raise ConfigError(f"depth_first is a list of names of modules, got {names!r}")
    if not all(isinstance(name, str) for name in names or ()):
        raise ConfigError(f"depth_first has names of modules, which are strings, got {names!r}")
    sizes = names if isinstance(names, Mapping) else dict.fromkeys(names or (), TILE_NUMEL)
    chains = [_find(module, name, numel) for name, numel in sizes.items()]
    for chain in chains:
        _check(chain)
    for first, second in combinations(chains, 2):
        if _overlap(first, second):
            raise ConfigError(
                f"depth_first has {first.name!r} and {second.name!r}, which have modules in "
                "common: name each once"
            )
    return chains


def _overlap(first: Chain, second: Chain) -> bool:
    """Whether a part of one chain is, or lies in, a part of the other."""
    pairs = [(f"{a}.", f"{b}.") for a in first.paths for b in second.paths]
    return any(a.startswith(b) or b.startswith(a) for a, b in pairs)


def _find(module: nn.Module, name: str, tile_numel: Any) -> Chain:
    if not isinstance(tile_numel, int) or tile_numel is True or tile_numel < 1:
        raise ConfigError(f"depth_first[{name!r}] must be a number of elements, got {tile_numel!r}")
    known = dict(module.named_modules(remove_duplicate=False))
    if name and name in known:
        return Chain(name, known[name], (), tile_numel)
    parent, _, ends = str(name).rpartition(".")
    first, _, last = ends.partition("-")
    children = [*known[parent]._modules] if parent in known else []
    if first in children and last in children[children.index(first) :]:
        chosen = children[children.index(first) : children.index(last) + 1]
        return Chain(name, known[parent], tuple(chosen), tile_numel)
    hint = did_you_mean(str(name), filter(None, known), ": ", cutoff=0.0)
    raise ConfigError(
        f"depth_first has {name!r}, which is no module's name{hint} "
        "(consecutive children of an nn.Sequential are named as in 'features.0-2')"
    )


def _check(chain: Chain) -> None:
    owner, class_name = chain.owner, type(chain.owner).__name__
    if chain.children and type(owner).forward is not nn.Sequential.forward:
        raise ConfigError(
            f"depth_first has {chain.name!r}: only children of an nn.Sequential run one after the "
            f"other, and this is a {class_name}; name single modules"
        )
    if chain.children and "forward" in owner.__dict__:
        raise ConfigError(
            f"depth_first has {chain.name!r}, children of a module whose forward was replaced, as "
            "activation checkpointing does: do either with it"
        )
    if type(owner).forward is nn.Module.forward:
        raise ConfigError(
            f"depth_first has {chain.name!r}, a {class_name}, which is never called: name its "
            "children"
        )
    for part in chain.parts:
        inner = part.children() if not chain.children else [part]
        if any(isinstance(each, FSDPModule) for child in inner for each in child.modules()):
            raise ConfigError(
                f"depth_first has {chain.name!r}, and fully_shard was applied to a part of it: "
                "apply it to the whole chain or around it, as its parts run once for every tile"
            )


def install_candidates(module: nn.Module) -> None:
    """Prepares the chains that a ``MemoryWatch`` may pick. Until then all runs as before."""
    candidates = []
    for chain in find_candidates(module):
        with suppress(ConfigError):
            _check(chain)
            candidates.append(chain)
    install_chains(candidates, picked=False)


def installed_chains(module: nn.Module) -> list[DepthFirst]:
    """All chains of ``module``, picked or not."""
    forwards = [part.__dict__.get("forward") for part in module.modules()]
    found = [each for each in forwards if isinstance(each, DepthFirst)]
    for each in forwards:
        found += each.chains.values() if isinstance(each, _Stretches) else []
    return found


def install_chains(chains: Sequence[Chain], *, picked: bool = True) -> None:
    """Makes the chains run depth first on Slabs, if they are picked. Names, keys and hooks stay."""
    for chain in chains:
        table = chain.owner.__dict__
        if not chain.children:
            table["forward"] = DepthFirst(chain, chain.owner.forward, picked=picked)
        else:
            table.setdefault("forward", _Stretches(chain.owner)).add(chain, picked=picked)


class _Stretches:
    """The ``forward`` of an ``nn.Sequential`` some of whose children are chains."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self.chains: dict[Sequence[str], DepthFirst] = {}
        """By the names of their children."""

    def add(self, chain: Chain, *, picked: bool) -> None:
        run = partial(self._run_children, chain.children)
        self.chains[chain.children] = DepthFirst(chain, run, picked=picked)

    def __call__(self, input: Any) -> Any:
        names = tuple(self._owner._modules)
        place = 0
        while place < len(names):
            children = self._chain_at(names[place:])
            if children:
                input = self.chains[children](input)
            else:
                input = self._owner._modules[names[place]](input)  # type: ignore[misc]
            place += max(1, len(children))
        return input

    def _chain_at(self, names: Sequence[str]) -> Sequence[str]:
        """The chain whose children come first, if there is one and none of them was taken away."""
        return next((each for each in self.chains if names[: len(each)] == each), ())

    def _run_children(self, names: Sequence[str], x: Any) -> Any:
        for name in names:
            x = self._owner.get_submodule(name)(x)
        return x


_CONVS = (conv._ConvNd,)
_POOLS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd)
_TILEABLE = (
    *_CONVS,
    *_POOLS,
    *(padding._ConstantPadNd, padding._ReplicationPadNd),
    *(nn.Identity, nn.Sequential),  # of no layers
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid),
)


def find_candidates(module: nn.Module) -> list[Chain]:
    """Chains without modules in common.

    They are stretches of layers in an ``nn.Sequential``, each to the next layer that makes tensors
    smaller, and modules of such layers with a ``forward`` of their own. Whether they can be
    computed tile by tile is known only when they run.
    """
    return list(_inside(module, "", set()))


def _inside(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[Chain]:
    if type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__:
        yield from _stretches(module, name)
    for child_name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        path = f"{name}.{child_name}".lstrip(".")
        found = list(_inside(child, path, seen))
        if not found and _is_block(child):
            found = [Chain(path, child, ())]
        yield from found


def _stretches(module: nn.Module, name: str) -> Iterator[Chain]:
    row: list[str] = []
    for child_name, child in [*module._modules.items(), ("", None)]:
        joins = child is not None and _is_leaf(child) and _is_tileable(child)
        if joins:
            row.append(child_name)
        if not joins or _shrinks(child):
            if _is_worth(module, row):
                yield Chain(f"{name}.{row[0]}-{row[-1]}".lstrip("."), module, tuple(row))
            row = []


def _is_worth(module: nn.Module, names: list[str]) -> bool:
    """Whether there is something between layers, at least one of which is a convolution."""
    return len(names) > 1 and any(isinstance(module._modules[name], _CONVS) for name in names)


def _is_block(module: nn.Module) -> bool:
    own = type(module).forward not in (nn.Sequential.forward, nn.Module.forward)
    leaves = [part for part in module.modules() if _is_leaf(part)]
    has_conv = any(isinstance(leaf, _CONVS) for leaf in leaves)
    is_known = "forward" not in module.__dict__ and all(map(_is_tileable, leaves))
    return own and not _is_leaf(module) and has_conv and is_known


def _is_leaf(module: nn.Module) -> bool:
    return not module._modules


def _is_tileable(leaf: nn.Module) -> bool:
    """As far as its class tells; those of users are tried."""
    is_theirs = not type(leaf).__module__.startswith("torch.")
    return "forward" not in leaf.__dict__ and (is_theirs or isinstance(leaf, _TILEABLE))


def _shrinks(layer: nn.Module | None) -> bool:
    if isinstance(layer, conv._ConvNd):
        return not layer.transposed and max(layer.stride) > 1
    return isinstance(layer, _POOLS)
