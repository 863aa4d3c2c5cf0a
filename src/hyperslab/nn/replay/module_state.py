"""What a module's passes depend on besides their arguments, so that changes are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from hyperslab.nn.replay.reachable import PLAIN, Reachable

_END = object()


class ModuleState:
    """The attributes, parameters and buffers of a module and its parts, as they are now.

    So are plain attributes of their classes, and what lies in lists, dicts, sets and tuples. All
    of it is kept alive, tensors with the memory that they have now. What other objects hold is not
    looked at.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Of tensors that are not on ``device`` the values count too."""
        found = Reachable(module)
        self.parts, self.generators = found.parts, found.generators
        self.tensors = [x for x in found.tensors if _is_seen(x, device)]
        self.odd = [x for x in found.tensors if not _is_seen(x, device)]
        """Tensors whose changes cannot be noticed."""
        self._here = [x for x in self.tensors if x.device == device]
        self._memory = [x.detach() for x in self._here]
        self._elsewhere = [x for x in self.tensors if x.device != device]
        self._kinds = self._find_kinds()
        self._holders = [*found.tables, *found.containers]
        self._held = [_content(holder) for _, holder in self._holders]
        self._tables = [table for _, table in found.tables if isinstance(table, dict) and table]
        self._classes = [table for _, table in found.tables if not isinstance(table, dict)]
        self._empty = [holder for _, holder in self._holders if not holder]
        full = [holder for _, holder in found.containers if holder]
        self._lists = [*full, *(each.values() for each in full if isinstance(each, dict))]
        self._lengths = [*map(len, self._lists)]
        self._values = [*self._find_values()]

    def _find_values(self) -> Iterator[object]:
        return chain(
            chain.from_iterable(map(dict.values, self._tables)),
            chain.from_iterable(map(methodcaller("values"), self._classes)),
            chain.from_iterable(self._lists),
            (_END,),
        )

    def _find_kinds(self) -> list[object]:
        here = [x.requires_grad for x in self._here], [x.dtype for x in self._here]
        elsewhere = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in self._elsewhere]
        return [*here, elsewhere, [version_of(x) for x in self._elsewhere]]

    @property
    def moved(self) -> bool:
        """Whether a tensor has other memory or strides, or wants gradients where it did not."""
        same = all(map(Tensor.is_set_to, self._here, self._memory))
        return not same or self._find_kinds() != self._kinds

    def change(self) -> str:
        """What is not as it was, in words; empty where all is."""
        same = not any(self._empty) and [*map(len, self._lists)] == self._lengths
        # What is equal and not the same is rare.
        if not (same and all(map(is_, self._find_values(), self._values))):
            if found := self._find_change():
                return found
            self._values = [*self._find_values()]
        return "a weight or another tensor was replaced" if self.moved else ""

    def _find_change(self) -> str:
        for before, (owner, holder) in zip(self._held, self._holders, strict=True):
            now = _content(holder)
            for name in {**before, **now}:
                if name not in before or name not in now or not _same(before[name], now[name]):
                    return f"{name} of {owner} has changed"
        return ""


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was written into; those of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _content(holder: Any) -> dict[Any, Any]:
    """What ``holder`` holds, by name or number."""
    return dict(holder.items() if hasattr(holder, "items") else enumerate(holder))


def _is_seen(tensor: Tensor, device: torch.device) -> bool:
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):  # such as a DTensor
        return False
    return tensor.device == device or not tensor.is_inference()


def _same(before: object, now: object) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, PLAIN) and before == now
