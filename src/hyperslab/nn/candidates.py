"""The chains of a network that could be computed depth first, from its modules alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules import conv, padding, pooling

from hyperslab.nn.depth_first import Chain

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
