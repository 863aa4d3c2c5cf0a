"""What a training step keeps in memory, from a run on tensors without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyperslab.kernels import fused
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.nn.deferred import ACTIVATIONS, POOLS
from hyperslab.nn.depth_first.survey import ReadOnly, Weights
from hyperslab.nn.op import OPS
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.nn.trial_run import Casts, untouched
from hyperslab.torch_private import (
    FakeTensorMode,
    fake_tensor_mode,
    tree_leaves,
    tree_map,
    untraced,
)

MOST_FUSED = 3
"""The largest kernel of a pool that is computed together with the activation before it."""
BITS = 8


@dataclass
class Visit:
    """One run through a chain."""

    chain: str
    input: Tensor
    """Without values."""
    output: Tensor | None = None

    @property
    def ends(self) -> list[Tensor]:
        return [self.input] if self.output is None else [self.input, self.output]


@dataclass
class Call:
    """One torch function."""

    function: Callable[..., Any]
    visit: Visit | None
    """The run through a chain that it is part of."""
    largest: int
    """The elements of its largest tensor."""
    passing: int
    """The bytes of what it reads and makes, or of their gradients."""
    keeps: dict[int, int] = field(default_factory=dict)
    """The bytes that its gradient needs, by the tensors' places in memory."""


@dataclass(frozen=True)
class Weight:
    """What a step over the whole batch keeps. All is in bytes."""

    calls: Sequence[Call]
    given: Collection[int]
    """The places of tensors that are there anyway."""

    @property
    def visits(self) -> list[Visit]:
        found = {id(call.visit): call.visit for call in self.calls if call.visit is not None}
        return list(found.values())

    def within(self, chain: str) -> float:
        """The most that exists at a time inside the chain, layer by layer."""
        calls = [call for call in self.calls if call.visit and call.visit.chain == chain]
        return Weight(calls, self.given).peak({})

    def peak(self, tiles: Mapping[str, int], share: float = 1.0) -> float:
        """The most that exists at a time, on a rank that has a ``share`` of everything.

        The chains named in ``tiles`` are computed in tiles whose largest tensor has so many
        elements. A call's gradient needs what it and the calls before it keep; memory is needed
        for what passes through it besides.
        """
        kept, most, total = set(self.given), 0.0, 0.0
        for visit, calls in self._stretches(tiles):
            if visit is None:
                for call in calls:
                    total += _new(call.keeps, kept)
                    most = max(most, total + call.passing)
                continue
            total += _new({_place(visit.input): _nbytes(visit.input)}, kept)
            largest = share * max(1, *(call.largest for call in calls))
            within = Weight(calls, kept).peak({}) * min(1.0, tiles[visit.chain] / largest)
            ends = sum(_nbytes(end) for end in visit.ends if _place(end) not in self.given)
            most = max(most, total + ends + within)
        return share * most

    def _stretches(self, tiles: Collection[str]) -> Iterator[tuple[Visit | None, list[Call]]]:
        """Calls in a row, of one run through a chain in ``tiles`` or of none."""
        row: list[Call] = []
        before: Visit | None = None
        for call in self.calls:
            visit = call.visit if call.visit and call.visit.chain in tiles else None
            if row and visit is not before:
                yield before, row
                row = []
            row.append(call)
            before = visit
        if row:
            yield before, row


def _new(keeps: Mapping[int, int], kept: set[int]) -> int:
    """The bytes of what is not ``kept`` yet, and is now."""
    new = {place: nbytes for place, nbytes in keeps.items() if place not in kept}
    kept.update(new)
    return sum(new.values())


_SCALES: list[Scale] = []


def current_scale() -> Scale | None:
    """What weighs the running forward pass, if anything does."""
    return _SCALES[-1] if _SCALES else None


class Scale(TorchFunctionMode):
    """Notes every torch function and what its gradient needs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.given: set[int] = set()
        """The places of tensors that are there anyway."""
        self._fuses = device.type == "cuda" and fused.is_measured(device)
        self._visit: Visit | None = None
        self._call: Call | None = None
        self._alive: list[Any] = []  # so that no place in memory is taken twice

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._call = call = Call(func, self._visit, 0, 0)
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
        return x.requires_grad or _place(x) not in self.given

    def _is_fused(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if not self._fuses or function not in POOLS or not isinstance(args[0], Tensor):
            return False
        windows = OPS[function].parse(args, kwargs).windows
        fits = max(window.kernel for window in windows) <= MOST_FUSED
        return fits and args[0].ndim > 3 and args[0].numel() >= fused.MIN_NUMEL

    def _fuse(self, pool: Call, read: Tensor, made: Tensor) -> None:
        """Has a pool keep a bit of every input, or a byte of every output, in place of both."""
        if self.calls and self.calls[-1].function in ACTIVATIONS:
            self.calls.pop()
        is_average = "avg" in pool.function.__name__
        pool.keeps = {-len(self.calls): read.numel() // BITS if is_average else made.numel()}

    def keep(self, saved: Tensor) -> Tensor:
        """Hears of a tensor that a gradient needs."""
        if self._call is not None:
            self._alive.append(saved)
            self._call.keeps[_place(saved)] = _nbytes(saved)
        return saved

    @contextmanager
    def through(self, chain: str, input: Tensor) -> Iterator[Visit]:
        """Within it, functions are parts of the chain."""
        before, self._visit = self._visit, Visit(chain, input)
        self._alive.append(input)
        try:
            yield self._visit
        finally:
            self._visit = before


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _place(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def weigh(
    run: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module, device: torch.device
) -> Weight:
    """Follows the whole batch through ``run``, the forward pass of ``module``.

    Plain tensors without values stand for Slabs and parameters. Hooks do not run, and the module
    stays as it is. Raises what the module does.
    """
    weights, scale = Weights(list(module.modules())), Scale(device)
    valueless = fake_tensor_mode()
    leaves = [nn.Parameter(p.detach(), p.requires_grad) for p in weights.parameters]
    with ExitStack() as stack:
        for mode in (
            untraced(),
            untouched(module),
            weights.replaced(leaves),
            valueless,
            ReadOnly(),  # type: ignore[no-untyped-call]
            Casts.now(device).again(),
            torch.autograd.graph.saved_tensors_hooks(scale.keep, lambda saved: saved),
            _in_use(scale),
        ):
            stack.enter_context(mode)
        _replace_buffers(module, valueless)
        args, kwargs = tree_map(_valueless, (args, kwargs), is_leaf=is_slab)
        inputs = filter(_is_tensor, tree_leaves((args, kwargs)))
        scale.given.update(map(_place, (*inputs, *leaves, *module.buffers())))
        stack.enter_context(scale)
        run(*args, **kwargs)
        return Weight(scale.calls, scale.given)


def _replace_buffers(module: nn.Module, mode: FakeTensorMode) -> None:
    """Has buffers without values, so that nothing is written into those with values."""
    for part in module.modules():
        named = part._buffers.items()
        part._buffers.update({name: x if x is None else mode.from_tensor(x) for name, x in named})


@contextmanager
def _in_use(scale: Scale) -> Iterator[None]:
    _SCALES.append(scale)
    try:
        yield
    finally:
        _SCALES.pop()


def _valueless(leaf: Any) -> Any:
    if not isinstance(leaf, Slab):
        return leaf
    kind = memory_format_of(leaf.local)
    like: dict[str, Any] = {"dtype": leaf.dtype, "device": leaf.device, "memory_format": kind}
    return torch.empty(leaf.shape, **like).requires_grad_(leaf.requires_grad)


def gib(nbytes: float) -> str:
    """A number for people."""
    value = nbytes / 2**30
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} GiB"
