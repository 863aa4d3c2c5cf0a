"""A forward pass that is tried out, and leaves no trace."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what users may use
    for table in tables:
        table.update({name: OrderedDict() for name in _HOOKS})
    try:
        yield
    finally:
        for holder, content in (*kept, *held):
            holder.clear()
            (holder.extend if isinstance(holder, list) else holder.update)(content)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _holds(value: Any) -> bool:
    return isinstance(value, list | dict | set)
