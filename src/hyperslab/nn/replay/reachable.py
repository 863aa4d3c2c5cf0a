"""What the passes of a module may use, as far as it can be found."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyperslab.nn.slab import Slab

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What is compared by its value, and never changes."""

_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
)
_UNCHANGING = (tuple, frozenset)


class Reachable:
    """A module's parts, with those in its lists and dicts, and what they hold."""

    def __init__(self, module: nn.Module) -> None:
        self.parts: list[nn.Module] = []
        self.tables: list[tuple[str, Mapping[str, Any]]] = []
        """Whose attributes, and these: those of modules, and of their classes."""
        self.containers: list[tuple[str, Any]] = []
        """What a list, a dict or a set is, and the list itself."""
        self.tensors: list[Tensor] = []
        self.generators: list[object] = []
        """What draws random numbers, besides the generators that all share."""
        self._seen: set[int] = set()
        for name, part in module.named_modules():
            self._add_part(part, name or type(part).__name__)

    def _add_part(self, part: nn.Module, name: str) -> None:
        if self._is_new(part):
            self.parts.append(part)
            for table in (part._parameters, part._buffers, part._modules, part.__dict__):
                self._add_table(table, name)
            for cls in type(part).__mro__:
                if cls.__module__.partition(".")[0] not in ("torch", "hyperslab", "builtins"):
                    self._add_table(vars(cls), cls.__name__, cls)

    def _add_table(self, table: Mapping[str, Any], owner: str, key: object = None) -> None:
        if self._is_new(table if key is None else key):
            self.tables.append((owner, table))
            for name, value in table.items():
                self._add(value, f"{name} of {owner}")

    def _add(self, value: Any, name: str) -> None:
        if isinstance(value, PLAIN):
            return
        if isinstance(value, Slab):
            value = value.local
        if isinstance(value, Tensor):
            if self._is_new(value):
                self.tensors.append(value)
        elif isinstance(value, nn.Module):
            self._add_part(value, type(value).__name__)
        elif isinstance(value, (dict, list, set, deque, *_UNCHANGING)):
            self._add_container(value, name)
        elif isinstance(value, BuiltinMethodType | MethodType):  # such as the draw of a generator
            self._add(value.__self__, name)
        elif isinstance(value, _GENERATORS):
            self.generators.append(value)

    def _add_container(self, container: Any, name: str) -> None:
        if self._is_new(container):
            if not isinstance(container, _UNCHANGING):
                self.containers.append((name, container))
            for value in container.values() if isinstance(container, dict) else container:
                self._add(value, name)

    def _is_new(self, value: object) -> bool:
        """Whether it is seen for the first time. All that is seen is held by the module."""
        is_new = id(value) not in self._seen
        self._seen.add(id(value))
        return is_new
