"""The state of a module: what its passes depend on besides their arguments.

``ModuleSnapshot`` tells what has changed and can put it back. ``plain_attributes`` is the part of
the state that has a hash, ``TensorVersions`` tells whether tensors were written into.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
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
_END = object()


class ModuleSnapshot:
    """The attributes, parameters and buffers of a module and its parts, as they are now.

    So are plain attributes of their classes, and what lies in lists, dicts, sets and tuples. All
    of it is kept alive, tensors with the memory that they have now. What other objects hold is not
    looked at.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Of tensors that are not on ``device`` the values count too."""
        found = _Contents(module)
        self.parts, self.generators = found.parts, found.generators
        self.tensors = [x for x in found.tensors if _is_tracked(x, device)]
        self.untracked = [x for x in found.tensors if not _is_tracked(x, device)]
        """Tensors whose changes cannot be noticed."""
        self._here = [x for x in self.tensors if x.device == device]
        self._memory = [x.detach() for x in self._here]
        self._elsewhere = [x for x in self.tensors if x.device != device]
        self._specs = self._find_specs()
        self._holders = [*found.tables, *found.containers]
        self._held = [_content(holder) for _, holder in self._holders]
        self._tables = [table for _, table in found.tables if isinstance(table, dict) and table]
        self._classes = [table for _, table in found.tables if not isinstance(table, dict)]
        self._empty = [holder for _, holder in self._holders if not holder]
        full = [holder for _, holder in found.containers if holder]
        self._lists = [*full, *(each.values() for each in full if isinstance(each, dict))]
        self._lengths = [*map(len, self._lists)]
        self._values = [*self._find_values()]

    def restore(self) -> None:
        """Puts back the attributes of modules, and what their lists, dicts and sets held.

        Values of tensors and attributes of classes stay as they are.
        """
        for (_, holder), held in zip(self._holders, self._held, strict=True):
            if isinstance(holder, dict):
                holder.clear()
                holder.update(held)
            elif isinstance(holder, list | deque):
                holder.clear()
                holder.extend(held.values())
            elif isinstance(holder, set):
                holder.clear()
                holder.update(held.values())

    def _find_values(self) -> Iterator[object]:
        return chain(
            chain.from_iterable(map(dict.values, self._tables)),
            chain.from_iterable(map(methodcaller("values"), self._classes)),
            chain.from_iterable(self._lists),
            (_END,),
        )

    def _find_specs(self) -> list[object]:
        here = [x.requires_grad for x in self._here], [x.dtype for x in self._here]
        elsewhere = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in self._elsewhere]
        return [*here, elsewhere, [version_of(x) for x in self._elsewhere]]

    @property
    def moved(self) -> bool:
        """Whether a tensor has other memory or strides, or wants gradients where it did not."""
        same = all(map(Tensor.is_set_to, self._here, self._memory))
        return not same or self._find_specs() != self._specs

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


def plain_attributes(modules: Sequence[nn.Module], *, modes: bool = True) -> tuple[object, ...]:
    """What the modules do, as far as numbers, strings, tuples and dtypes among attributes tell.

    Without ``modes``, whether they train does not count.
    """
    plain = (int, float, str, tuple, torch.dtype)
    return tuple(
        (
            type(module),
            *(
                (name, value)
                for name, value in module.__dict__.items()
                if isinstance(value, plain) and (modes or name != "training")
            ),
        )
        for module in modules
    )


class ParameterSlots:
    """The parameters of ``modules``, in whose place others can be put."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        named = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items()]
        found = {id(p): p for _, _, p in named if p is not None}
        numbers = {key: number for number, key in enumerate(found)}
        self.parameters = list(found.values())
        self._slots = [(t, name, numbers[id(p)]) for t, name, p in named if p is not None]

    @contextmanager
    def replaced(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Within it, modules have ``others`` in the place of their parameters."""
        kept = [(table, name, table[name]) for table, name, _ in self._slots]
        try:
            for table, name, number in self._slots:
                table[name] = others[number]  # type: ignore[assignment]
            yield
        finally:
            for table, name, parameter in kept:
                table[name] = parameter


class TrainedWeights:
    """The parameters of ``module`` that want gradients, looked for again only after a change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._known: list[object] = []
        self._all: list[nn.Parameter] = []
        self._wants: list[bool] = []
        self._trained: list[Tensor] = []

    def find(self) -> list[Tensor]:
        """Those of now: the very same list as long as they are the same."""
        same = self._parts and all(map(is_, self._holders_and_held(), self._known))
        if not same:
            self._parts, self._all = [*self._module.modules()], [*self._module.parameters()]
            self._known, self._wants = [*self._holders_and_held()], []
        wants = [*map(_REQUIRES_GRAD, self._all)]
        if wants != self._wants:
            self._wants = wants
            self._trained = [*compress(self._all, wants)]
        return self._trained

    def _holders_and_held(self) -> Iterator[object]:
        tables = [*chain.from_iterable(map(_TABLES, self._parts))]
        return chain(tables, chain.from_iterable(map(dict.values, tables)), (_END,))


_TABLES = attrgetter("_parameters", "_modules")
_REQUIRES_GRAD = attrgetter("requires_grad")


class TrainingModes:
    """Whether each of ``modules`` is in training or in evaluation now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it, modules are as they were when this was made."""
        before = TrainingModes(module for module, _ in self._modes)
        try:
            self._set()
            yield
        finally:
            before._set()

    def _set(self) -> None:
        for module, training in self._modes:
            module.training = training


class TensorVersions:
    """Tensors, and how often each was written into; equal to that of the same tensors later on.

    Tensors of inference mode do not count it.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = [*tensors]
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._versions = [*map(_VERSION, self._counted)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorVersions) or len(self.tensors) != len(other.tensors):
            return False
        return self._versions == other._versions and all(map(is_, self.tensors, other.tensors))

    __hash__ = None  # type: ignore[assignment]

    def have_changed(self) -> bool:
        """Whether one of the tensors was written into since this was made."""
        return [*map(_VERSION, self._counted)] != self._versions


_VERSION = attrgetter("_version")


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was written into; those of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _content(holder: Any) -> dict[Any, Any]:
    """What ``holder`` holds, by name or number."""
    return dict(holder.items() if hasattr(holder, "items") else enumerate(holder))


def _is_tracked(tensor: Tensor, device: torch.device) -> bool:
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):  # such as a DTensor
        return False
    return tensor.device == device or not tensor.is_inference()


def _same(before: object, now: object) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, PLAIN) and before == now


class _Contents:
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
        self._met: set[int] = set()
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
        """Whether it is met for the first time. All that is met is held by the module."""
        is_new = id(value) not in self._met
        self._met.add(id(value))
        return is_new
