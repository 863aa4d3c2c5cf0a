"""Activations computed again in the backward pass, rather than kept."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperslab.errors import ConfigError


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
