"""A forward pass that is tried out, and leaves no trace."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Within it no hooks run; after it modules are as they were, and so are random numbers.

    What a forward pass keeps for the next, such as a mask that it makes once, it has to make again:
    attributes are put back, with what the lists, dicts and sets among them held. torch's random
    state is not: for tensors without values it draws no numbers.
    """
    tables = [part.__dict__ for part in module.modules()]
    kept = [(table, dict(table)) for table in tables]
    held = [(each, each.copy()) for table in tables for each in table.values() if _holds(each)]
    for table in tables:
        table.update({name: OrderedDict() for name in HOOKS})
    try:
        with same_draws():
            yield
    finally:
        for holder, content in (*kept, *held):
            holder.clear()
            (holder.extend if isinstance(holder, list) else holder.update)(content)


def _holds(value: Any) -> bool:
    return isinstance(value, list | dict | set)


@contextmanager
def same_draws() -> Iterator[tuple[object, ...]]:
    """After it, Python and numpy draw the numbers that they would have drawn without it."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - as users may
    try:
        yield draws()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def draws() -> tuple[object, ...]:
    """What changes when Python or numpy draw numbers."""
    return random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


@dataclass(frozen=True)
class Casts:
    """How operands are cast on a kind of device."""

    kind: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device: torch.device) -> Casts:
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> torch.autocast:
        """Without a cache: what it keeps of weights would outlive a tile and its graph."""
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)
