"""Networks by name, with options as a TOML table gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin

from torch import nn

from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.models.autoencoder import DenseAutoencoder
from hyperslab.models.cosmoflow import CosmoFlow
from hyperslab.models.hepcnn import HEPCNN
from hyperslab.models.mesh_tangling import mesh_1k, mesh_2k
from hyperslab.models.resnet import ResNet50
from hyperslab.models.tiramisu import Tiramisu
from hyperslab.models.unet3d import UNet3d

MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "cosmoflow": CosmoFlow,
        "hepcnn": HEPCNN,
        "tiramisu": Tiramisu,
        "mesh-1k": mesh_1k,
        "mesh-2k": mesh_2k,
        "resnet50": ResNet50,
        "unet3d": UNet3d,
        "autoencoder": DenseAutoencoder,
    }
)

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def build(name: str, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The network ``name`` of ``MODELS``, made with ``options``."""
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r}{_hint(name, MODELS, 'the models are')}")
    given = dict(options or {})
    check_options(MODELS[name], given, f"model {name}")
    _check_kinds(MODELS[name], given, f"model {name}")
    try:
        return MODELS[name](**given)
    except ConfigError as error:
        raise ConfigError(f"model {name}: {error}") from error


def check_options(make: Callable[..., Any], options: Mapping[str, Any], what: str) -> None:
    """That ``make`` has all ``options`` among its keyword arguments, and needs no others."""
    parameters = inspect.signature(make).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    for key in options:
        if key not in named and not takes_any:
            raise ConfigError(f"{what} has no option {key!r}{_hint(key, named, 'it has')}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in options]
    if missing:
        raise ConfigError(f"{what} needs the option {missing[0]!r}")


def _hint(wrong: str, known: Iterable[str], they_are: str) -> str:
    hint = did_you_mean(wrong.lower(), known, "; ", cutoff=0.5)
    return f"{hint} ({they_are} {', '.join(known) or 'none'})"


def _check_kinds(make: Callable[..., Any], options: Mapping[str, Any], what: str) -> None:
    parameters = inspect.signature(make, eval_str=True).parameters
    for key, value in options.items():
        kind = parameters[key].annotation
        if not _is_a(value, kind):
            raise ConfigError(f"{what}: {key} must be {_word(kind)}, got {value!r}")


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is UnionType:
        return any(_is_a(value, each) for each in get_args(kind))
    if get_origin(kind) is not None:  # a sequence
        (item,) = get_args(kind)
        return isinstance(value, list | tuple) and all(_is_a(each, item) for each in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _word(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(_word(each) for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is not None:
        return f"a list, each {_word(get_args(kind)[0])}"
    return WORDS[kind]
