"""What a training step keeps in memory, from a run on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyperslab.kernels import fused
from hyperslab.layout import Window
from hyperslab.nn.deferred import ACTIVATIONS, POOLS
from hyperslab.nn.op import OPS
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.nn.trial_run import ReadOnly, no_trace, trial_run, without_values
from hyperslab.torch_private import FakeTensorMode, tree_leaves, tree_map

MOST_FUSED = 3
"""The largest kernel of a pool that is computed together with the activation before it."""
BITS = 8


@dataclass
class ChainRun:
    """One run through a chain."""

    chain: str
    input: Tensor
    """Without values."""
    output: Tensor | None = None

    @property
    def ends(self) -> list[Tensor]:
        return [self.input] if self.output is None else [self.input, self.output]


@dataclass
class CountedCall:
    """One torch function."""

    function: Callable[..., Any]
    chain_run: ChainRun | None
    """The run through a chain that it is part of."""
    largest: int
    """The elements of its largest tensor."""
    passing: int
    """The bytes of what it reads and makes, or of their gradients."""
    keeps: dict[int, int] = field(default_factory=dict)
    """The bytes that its gradient needs, by the tensors' storages."""


@dataclass(frozen=True)
class MemoryEstimate:
    """What a step over the whole batch keeps. All is in bytes."""

    calls: Sequence[CountedCall]
    existing: Collection[int]
    """The storages of tensors that exist anyway."""

    @property
    def chain_runs(self) -> list[ChainRun]:
        found = {
            id(call.chain_run): call.chain_run for call in self.calls if call.chain_run is not None
        }
        return list(found.values())

    def within(self, chain: str) -> float:
        """The most that exists at a time inside the chain, layer by layer."""
        calls = [call for call in self.calls if call.chain_run and call.chain_run.chain == chain]
        return MemoryEstimate(calls, self.existing).peak({})

    def peak(self, tiles: Mapping[str, int], share: float = 1.0) -> float:
        """The most that exists at a time, on a rank that has a ``share`` of everything.

        The chains named in ``tiles`` are computed in tiles whose largest tensor has so many
        elements. A call's gradient needs what it and the calls before it keep; memory is needed
        for what passes through it besides.
        """
        kept, most, total = set(self.existing), 0.0, 0.0
        for chain_run, calls in self._stretches(tiles):
            if chain_run is None:
                for call in calls:
                    total += _new(call.keeps, kept)
                    most = max(most, total + call.passing)
                continue
            total += _new({_storage_id(chain_run.input): _nbytes(chain_run.input)}, kept)
            largest = share * max(1, *(call.largest for call in calls))
            within = MemoryEstimate(calls, kept).peak({}) * min(
                1.0, tiles[chain_run.chain] / largest
            )
            ends = sum(
                _nbytes(end) for end in chain_run.ends if _storage_id(end) not in self.existing
            )
            most = max(most, total + ends + within)
        return share * most

    def _stretches(
        self, tiles: Collection[str]
    ) -> Iterator[tuple[ChainRun | None, list[CountedCall]]]:
        """Calls in a row, of one run through a chain in ``tiles`` or of none."""
        row: list[CountedCall] = []
        before: ChainRun | None = None
        for call in self.calls:
            chain_run = call.chain_run if call.chain_run and call.chain_run.chain in tiles else None
            if row and chain_run is not before:
                yield before, row
                row = []
            row.append(call)
            before = chain_run
        if row:
            yield before, row


def _new(keeps: Mapping[int, int], kept: set[int]) -> int:
    """The bytes of what is not ``kept`` yet, and is now."""
    new = {place: nbytes for place, nbytes in keeps.items() if place not in kept}
    kept.update(new)
    return sum(new.values())


COUNTERS: list[MemoryCounter] = []
"""What counts the memory of the running forward pass, if anything does, is the last of them."""


class MemoryCounter(TorchFunctionMode):
    """Notes every torch function and what its gradient needs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[CountedCall] = []
        self.existing: set[int] = set()
        """The storages of tensors that exist anyway."""
        self._fuses = device.type == "cuda" and fused.is_measured(device)
        self._chain_run: ChainRun | None = None
        self._call: CountedCall | None = None
        self._alive: list[Any] = []  # so that no two storages have one id

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._call = call = CountedCall(func, self._chain_run, 0, 0)
        out = func(*args, **kwargs)
        read = [t for t in tree_leaves((args, kwargs)) if self._passes(t)]
        made = [*filter(_is_tensor, tree_leaves(out))]
        if not made:
            return out
        self._alive.append(made)
        call.largest = max(t.numel() for t in tree_leaves((args, kwargs, made)) if _is_tensor(t))
        call.passing = sum(map(_nbytes, (*read, *made)))
        if self._is_fused(func, args, kwargs):
            self._fuse(call, args[0], made[0])
        self.calls.append(call)
        return out

    def _passes(self, x: Any) -> bool:
        """Whether ``x``, or its gradient, takes memory that is not taken anyway."""
        if not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
            return False
        return x.requires_grad or _storage_id(x) not in self.existing

    def _is_fused(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if not self._fuses or function not in POOLS or not isinstance(args[0], Tensor):
            return False
        windows = cast(tuple[Window, ...], OPS[function].parse(args, kwargs).windows)
        fits = max(window.kernel for window in windows) <= MOST_FUSED
        return fits and args[0].ndim > 3 and args[0].numel() >= fused.MIN_NUMEL

    def _fuse(self, pool: CountedCall, read: Tensor, made: Tensor) -> None:
        """Has a pool keep a bit of every input, or a byte of every output, in place of both."""
        if self.calls and self.calls[-1].function in ACTIVATIONS:
            self.calls.pop()
        is_average = "avg" in pool.function.__name__
        pool.keeps = {-len(self.calls): read.numel() // BITS if is_average else made.numel()}

    def keep(self, saved: Tensor) -> Tensor:
        """Hears of a tensor that a gradient needs."""
        if self._call is not None:
            self._alive.append(saved)
            self._call.keeps[_storage_id(saved)] = _nbytes(saved)
        return saved

    @contextmanager
    def in_chain(self, chain: str, input: Tensor) -> Iterator[ChainRun]:
        """Within it, functions are parts of the chain."""
        before, self._chain_run = self._chain_run, ChainRun(chain, input)
        self._alive.append(input)
        try:
            yield self._chain_run
        finally:
            self._chain_run = before


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _storage_id(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def estimate_memory(
    run: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module, device: torch.device
) -> MemoryEstimate:
    """Follows the whole batch through ``run``, the forward pass of ``module``.

    Plain tensors without values stand for Slabs and parameters. Hooks do not run, and the module
    stays as it is. Raises what the module does.
    """
    counter, guard = MemoryCounter(device), ReadOnly()  # type: ignore[no-untyped-call]
    with (
        no_trace(module, device),
        trial_run([*module.modules()], device, guard, counter.keep) as trial,
        _in_use(counter),
    ):
        buffers = _replace_buffers(module, trial.mode)
        args, kwargs = tree_map(_without_values, (args, kwargs), is_leaf=is_slab)
        inputs = filter(_is_tensor, tree_leaves((args, kwargs)))
        counter.existing.update(map(_storage_id, (*inputs, *trial.leaves, *buffers)))
        with counter:
            run(*args, **kwargs)
    return MemoryEstimate(counter.calls, counter.existing)


def _replace_buffers(module: nn.Module, mode: FakeTensorMode) -> list[Tensor]:
    """Has buffers without values, so that nothing is written into those with values."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else mode.from_tensor(buffer)
    return [*module.buffers()]


@contextmanager
def _in_use(counter: MemoryCounter) -> Iterator[None]:
    COUNTERS.append(counter)
    try:
        yield
    finally:
        COUNTERS.pop()


def _without_values(leaf: Any) -> Any:
    return without_values(leaf) if isinstance(leaf, Slab) else leaf
