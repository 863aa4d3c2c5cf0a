"""The model of a run: built, given weights and precision, and made parallel."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.io import Dataset
from hyperslab.models import MODELS, build
from hyperslab.models.build import check_options
from hyperslab.nn import parallelize
from hyperslab.train.config import Config, ModelConfig
from hyperslab.train.export import load_weights
from hyperslab.train.finetune import with_head
from hyperslab.train.named import find_named


def make_model(config: Config, mesh: Mesh, data: Dataset) -> nn.Module:
    """The model on all ranks, with equal weights, drawn by the run's seed.

    Collective over all ranks.
    """
    seed, settings = config.train.seed, config.train
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - for the code of users
    torch.manual_seed(seed)
    model = build_model(config.model)
    if config.finetune.is_asked:
        model = with_head(model, config, data)
    if settings.precision == "fp64":
        model.double()
    if config.model.weights is not None:
        load_weights(model, Path(config.model.weights))
    if settings.channels_last:
        formats = {3: torch.channels_last, 4: torch.channels_last_3d}
        layout = formats.get(len(data.shape), torch.contiguous_format)
        model.to(memory_format=layout)  # type: ignore[call-overload]
    checkpoint_activations(model, settings.checkpoint_activations)
    return parallelize(
        model,
        mesh,
        shard_weights=settings.shard_weights,
        batch_stats=settings.batch_stats,
        depth_first=settings.depth_first,
        plan=config.plan,
        cuda_graphs=_graphs(config),
    )


def _graphs(config: Config) -> bool | str:
    """As asked; whether Python code of a user's model may stop running is not for us to say.

    Nor does ``auto`` record stages, each of which trains other weights.
    """
    asked = config.train.cuda_graphs
    changes = _is_users(config.model.name) or config.stages.epochs is not None
    return False if asked == "auto" and changes else asked


def _is_users(name: str) -> bool:
    """Whether the model of that name is a class or function of the user's."""
    return ":" in name


def _draws_later(config: ModelConfig) -> bool:
    """Whether the model can be made without values, which each rank draws where it holds them.

    Then no rank ever holds a matrix that is cut over ranks. They are the same on any mesh.
    """
    return hasattr(MODELS.get(config.name), "reset_parameters") and config.weights is None


def build_model(config: ModelConfig) -> nn.Module:
    """The plain module, with weights of its own."""
    name, options = config.name, config.options
    if not _is_users(name):
        with torch.device("meta") if _draws_later(config) else nullcontext():
            return build(name, options)
    make = find_named(name, "model.name")
    check_options(make, options, f"model {name}")
    model = make(**options)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name = {name!r} gives a {type(model).__name__}, not a module")
    return model


def build_without_values(config: ModelConfig) -> nn.Module:
    """The plain module to look at, on the meta device if its code can run there."""
    with suppress(Exception), torch.device("meta"):
        return build_model(config)
    try:
        return build_model(config)
    except HyperslabError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model {config.name} cannot be made: {said}") from error


# Activations computed again in the backward pass, rather than kept


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Makes the modules whose names fit ``patterns`` keep their inputs alone; returns the names.

    A module inside one that was chosen is left as it is. Names, keys and hooks stay.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        _check(pattern, names)
    chosen: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            contexts = partial(_contexts, module)
            module.forward = partial(
                checkpoint, module.forward, use_reentrant=False, context_fn=contexts
            )
            chosen.append(name)
    return chosen


Context = AbstractContextManager[None]


def _contexts(module: nn.Module) -> tuple[Context, Context]:
    """What the forward pass runs in, and what it runs in when it is repeated."""
    return nullcontext(), _own_buffers(module)


@contextmanager
def _own_buffers(module: nn.Module) -> Iterator[None]:
    """Within it, buffers are copies: running statistics do not count the same batch twice."""
    tables = [part._buffers for part in module.modules() if part._buffers]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.update({name: x if x is None else x.clone() for name, x in table.items()})
    try:
        yield
    finally:
        for table, originals in zip(tables, kept, strict=True):
            table.update(originals)


def _check(pattern: str, names: Sequence[str]) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = difflib.get_close_matches(pattern, names, 3, cutoff=0.3) or names[:3]
    raise ConfigError(
        f"train.checkpoint_activations has {pattern!r}, which no module's name fits; there are, "
        f"for instance, {', '.join(near)}"
    )


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within it, products of float32 on GPUs are those of TF32 if ``precision`` says so."""
    flags: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def forward_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """What forward passes and losses run in.

    Not bf16 on CPUs: there torch 2.13 leaves the weight gradients of convolutions over extents of 2
    unwritten (CosmoFlow's last layers are such), without a word.
    """
    if precision == "bf16" and device.type == "cpu":
        raise ConfigError(
            "train.precision = 'bf16' is for GPUs: on CPUs torch's gradients of some convolutions "
            "are wrong in bfloat16; use fp32, or auto"
        )
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
