"""What this rank has run, to be compared with what the others have.

Every rank must run the same operators on tensors of the same layouts. Where one does not, messages
never come, or fit by chance; the journals tell which operator was the first to differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Size, Tensor, get_autocast_dtype, is_autocast_enabled

from hyperslab.layout import Layout
from hyperslab.torch_private import backward_pass_id, is_any_autocast_enabled

LENGTH = 4096
"""How many operators are remembered."""


@dataclass(frozen=True)
class Entry:
    """An operator that was called, and its arguments as far as all ranks must agree on them.

    Slabs stand for their layouts, tensors for shapes and dtypes, so that nothing is kept alive. The
    dtypes of Slabs follow from these.
    """

    function: Callable[..., Any]
    arguments: tuple[object, ...]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "") or repr(self.function)

    @cached_property
    def fingerprint(self) -> int:
        """A number that is the same in every process."""
        mixed = crc32(self.name.encode())
        for argument in self.arguments:
            number = (
                argument.fingerprint if isinstance(argument, Layout) else crc32(_text(argument))
            )
            mixed = mixed * 31 + number & 0xFFFFFFFF
        return mixed

    def __str__(self) -> str:
        """The operator, the layout of its first Slab, and its other arguments."""
        layouts = [a.describe() for a in self.arguments if isinstance(a, Layout)]
        others = [_text(a).decode() for a in self.arguments if not isinstance(a, Layout)]
        of = f" of {' and '.join(layouts)}" if layouts else ""
        return f"{self.name}{of}" + (f" with {', '.join(others)}" if others else "")


class _Drawn:
    """Stands, in what is recorded of a pass, for the seed that each replay draws anew."""


DRAWN = _Drawn()


class Plain(NamedTuple):
    """What ranks must agree on of a tensor that is whole on all of them."""

    shape: Size
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"a tensor of {'x'.join(map(str, self.shape)) or 'no dims'} in {_name(self.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(argument: object) -> bytes:
    return repr(argument).encode()


_PLAIN = frozenset([int, float, bool, str, NoneType])


def _outline(argument: object) -> object:
    """What ranks must agree on of an argument."""
    if argument.__class__ in _PLAIN:
        return argument
    if (layout := getattr(argument, "layout", None)).__class__ is Layout:
        return layout
    if isinstance(argument, Tensor):
        return Plain(argument.shape, argument.dtype)
    if isinstance(argument, torch.dtype) or argument is DRAWN:
        return argument
    if isinstance(argument, tuple | list):
        return tuple(map(_outline, argument))
    return type(argument).__name__


class _Autocast:
    """Stands in the journal for autocast being on for a type of device."""

    def __init__(self, device_type: str) -> None:
        self._dtype = get_autocast_dtype(device_type)

    def __repr__(self) -> str:
        return f"autocast to {_name(self._dtype)}"


class Journal:
    """The latest operators of this rank, and how many there have been."""

    def __init__(self) -> None:
        self._entries: deque[Entry | tuple[Callable[..., Any], list[object]]] = deque(maxlen=LENGTH)
        self.count = 0
        self.has_readers = False
        """Whether there ever was another rank; a single rank has nothing to compare."""

    def note(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """``add``, if there is anyone to compare it with."""
        if self.has_readers:
            self.add(function, args)

    def add(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Notes a call, except in backward passes: ranks may recompute different checkpoints."""
        if backward_pass_id() != -1:
            return
        outlines = [*map(_outline, args)]
        if is_any_autocast_enabled():
            outlines += [_Autocast(name) for name in ("cpu", "cuda") if is_autocast_enabled(name)]
        self._entries.append((function, outlines))
        self.count += 1

    def repeat(self, entries: Sequence[Entry], seeds: Iterable[int]) -> None:
        """Notes again what a recorded pass has run; ``seeds`` are those of this replay."""
        if rest := [*seeds]:
            entries = [*_with_seeds(entries, iter(rest))]
        self._entries.extend(entries)
        self.count += len(entries)

    def since(self, count: int) -> list[Entry]:
        """The operators after the first ``count``, as far as they are remembered."""
        num = min(self.count - count, len(self._entries))
        latest = [*islice(reversed(self._entries), num)][::-1]
        return [e if isinstance(e, Entry) else Entry(e[0], tuple(e[1])) for e in latest]

    def forget_since(self, count: int) -> None:
        """Takes back the operators after the first ``count``."""
        for _ in range(min(self.count - count, len(self._entries))):
            self._entries.pop()
        self.count = count


def _with_seeds(entries: Iterable[Entry], seeds: Iterator[int]) -> Iterator[Entry]:
    """``entries``, in which the next of ``seeds`` takes the place of each that is ``DRAWN``."""
    for entry in entries:
        is_drawn = entry.arguments[:1] == (DRAWN,)
        yield Entry(entry.function, (next(seeds), *entry.arguments[1:])) if is_drawn else entry


journal = Journal()
"""That of this process."""


def digest(entries: Iterable[Entry]) -> int:
    """A number that is the same on ranks that ran the same operators."""
    mixed = 0
    for entry in entries:
        mixed = mixed * 31 + entry.fingerprint & 0xFFFFFFFF
    return mixed


def first_difference(runs: Mapping[int, tuple[int, Sequence[str]]], shared: int) -> str:
    """Which of the first ``shared`` operators is another one on another rank, in words.

    ``runs[rank]`` are the operators that are known of a rank, and the number of those before them.
    Empty where all are the same.
    """
    lowest = min(runs)
    for place in range(max(start for start, _ in runs.values()), shared):
        ops = {
            rank: each[place - start] if place - start < len(each) else "nothing"
            for rank, (start, each) in sorted(runs.items())
        }
        other = next((rank for rank, op in ops.items() if op != ops[lowest]), None)
        if other is not None:
            return (
                f"operator {place + 1} is {ops[lowest]} on rank {lowest} and {ops[other]} on rank "
                f"{other}"
            )
    return ""
