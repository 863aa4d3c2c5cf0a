"""Networks by name, with options as a TOML table gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from hyperslab.annotations import MisfitError, expected, fit
from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.models.autoencoder import ConvAutoencoder, DenseAutoencoder
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
        "autoencoder-conv": ConvAutoencoder,
    }
)


def build(name: str, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The network ``name`` of ``MODELS``, made with ``options``."""
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r}{_hint(name, MODELS, 'the models are')}")
    make, given = MODELS[name], options or {}
    check_options(make, given, f"model {name}")
    try:
        return make(**_fitted(make, given))
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


def _fitted(make: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as the annotations of ``make`` want them."""
    parameters = inspect.signature(make, eval_str=True).parameters
    found = {}
    for key, value in options.items():
        annotation = parameters[key].annotation
        try:
            found[key] = fit(value, annotation)
        except MisfitError:
            wanted = expected(annotation, value)
            raise ConfigError(f"{key} must be {wanted}, got {value!r}") from None
    return found
