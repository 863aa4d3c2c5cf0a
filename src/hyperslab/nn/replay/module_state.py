"""What a module's passes depend on besides their arguments, so that changes are noticed."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What is compared by its value, and never changes."""


class ModuleState:
    """The attributes, parameters and buffers of a module and its parts, as they are now.

    They are kept alive. Of lists, dicts and sets only the lengths are known, hooks among them.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Of tensors that are not on ``device`` the values count too."""
        self._tables: list[dict[str, Any]] = []
        self._names: list[str] = []
        for name, part in module.named_modules():
            tables = [part.__dict__, part._parameters, part._buffers, part._modules]
            self._tables += [table for table in tables if table]
            self._names += [name or type(part).__name__ for table in tables if table]
        self._held = [dict(table) for table in self._tables]
        self._values = [*chain.from_iterable(table.values() for table in self._held)]
        lists = [value for value in self._values if isinstance(value, list | dict | set)]
        self._lists = [*self._tables, *lists]
        self._lengths = [*map(len, self._lists)]
        self.tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._elsewhere = [tensor for tensor in self.tensors if tensor.device != device]
        self._places = self._find_places()

    def _find_places(self) -> list[object]:
        pointers = map(Tensor.data_ptr, self.tensors)
        wants_grad = [tensor.requires_grad for tensor in self.tensors]
        return [*pointers, *wants_grad, *map(version_of, self._elsewhere)]

    @property
    def moved(self) -> bool:
        """Whether a tensor has other memory, or wants gradients where it did not."""
        return self._find_places() != self._places

    def change(self) -> str:
        """What is not as it was, in words; empty where all is."""
        values = chain.from_iterable(map(dict.values, self._tables))
        same = all(map(is_, values, self._values))  # what is equal and not the same is rare
        same = same and [*map(len, self._lists)] == self._lengths
        if not same:
            if found := self._find_change():
                return found
            self._values = [*chain.from_iterable(map(dict.values, self._tables))]
        return "a weight or another tensor was replaced" if self.moved else ""

    def _find_change(self) -> str:
        for before, now, owner in zip(self._held, self._tables, self._names, strict=True):
            for name in {**before, **now}:
                if name not in before or name not in now or not _same(before[name], now[name]):
                    return f"{name} of {owner} has changed"
        if [*map(len, self._lists)] != self._lengths:
            return "a list, a dict or a set of a module, such as one of hooks, has changed"
        return ""


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was written into; those of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _same(before: object, now: object) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, PLAIN) and before == now
