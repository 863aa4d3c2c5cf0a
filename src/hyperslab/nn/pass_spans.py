"""Forward and backward passes in a trace; in a detailed one, layer by layer."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hyperslab.comm.device_spans import Launched, Mark, device_spans
from hyperslab.nn.outputs import tensors_of
from hyperslab.nn.slab import Slab
from hyperslab.trace import Category, active
from hyperslab.trace.recorder import Recorder

COMPUTE = "gpu compute"


class _Passes:
    is_told = False
    """Whether somebody further out records this pass."""


class Told(Launched):
    """A span around a pass, within which nobody else records it."""

    __slots__ = ("_before",)

    def __enter__(self) -> Told:
        self._before, _Passes.is_told = _Passes.is_told, True
        super().__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        _Passes.is_told = self._before


def compute(
    name: str, device: torch.device, category: Category = Category.compute
) -> Told | active.Idle:
    """A span around a pass, or a part of one, of a loop that knows where its passes are."""
    if active.recorder is None:
        return active.IDLE
    return Told(active.recorder, COMPUTE, category, name, device)


def forward_pass(module: nn.Module, device: torch.device) -> Told | active.Idle:
    """A span around a forward pass of a parallelized module, if nobody records it yet."""
    if active.recorder is None:
        return active.IDLE
    if active.recorder.is_detailed:
        tell_layers(module, device)
    _follow_optimizers()
    return active.IDLE if _Passes.is_told else compute("forward", device)


def follow_backward(out: Any, device: torch.device) -> None:
    """Records the backward pass of what a forward pass gave, if nobody else does."""
    if active.recorder is None or _Passes.is_told or not torch.is_grad_enabled():
        return
    leaves = [leaf for leaf in tensors_of(out) if leaf.grad_fn is not None]
    if leaves:
        backward = _Backward(active.recorder, device)
        for leaf in leaves:
            leaf.register_hook(backward.begin)


class _Backward:
    """From the first gradient of an output until the whole pass has ended."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self._start: int | None = None
        self._mark: Mark | None = None

    def begin(self, grad: Tensor) -> None:
        if self._start is not None or _Passes.is_told or active.recorder is not self._recorder:
            return
        self._start = self._recorder.now()
        spans = device_spans(self._device)
        self._mark = None if spans is None else spans.mark()
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        start, self._start = self._start, None
        recorder = self._recorder
        if start is None or active.recorder is not recorder:
            return
        recorder.lane_of_thread().layer = 0
        _record(recorder, "backward", start, self._mark, self._device)


# Optimizers of loops that are not ours

_open_steps: dict[int, Launched] = {}
"""By the ids of optimizers, until the step has ended."""


@cache
def _follow_optimizers() -> None:
    register_optimizer_step_pre_hook(_begin_step)
    register_optimizer_step_post_hook(_end_step)


def _begin_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if active.recorder is None or _Passes.is_told:
        return
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if device is not None:
        name = type(optimizer).__name__
        span = Launched(active.recorder, COMPUTE, Category.optimizer, name, device)
        _open_steps[id(optimizer)] = span.__enter__()


def _end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (span := _open_steps.pop(id(optimizer), None)) is not None:
        span.__exit__(None, None, None)


# Layer by layer

_MAKER = "hyperslab layer"
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def tell_layers(module: nn.Module, device: torch.device) -> None:
    """Has the layers of ``module`` record themselves, by hooks that do nothing in other traces.

    Not where passes are recorded in CUDA graphs: those with hooks cannot be.
    """
    if module in _told:
        return
    _told.add(module)
    state = getattr(module, "_hyperslab", None)
    if device.type == "cuda" and state is not None and state.cuda_graphs:
        return
    for name, part in module.named_modules():
        if name and not [*part.children()]:
            layer = _Layer(name, device)
            part.register_forward_pre_hook(layer.begin)
            part.register_forward_hook(layer.end)


class _Layer:
    """Records when a layer runs forward, and when backward.

    The backward pass of a layer lasts from the gradient of its output until that of another one's.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._begun: tuple[int, Mark | None] | None = None

    def begin(self, module: nn.Module, args: Any) -> None:
        if (recorder := active.recorder) is None or not recorder.is_detailed:
            return
        spans = device_spans(self._device)
        self._begun = recorder.now(), None if spans is None else spans.mark()
        recorder.lane_of_thread().layer = recorder.number_of(self._name)

    def end(self, module: nn.Module, args: Any, out: Any) -> None:
        recorder = active.recorder
        begun, self._begun = self._begun, None
        if recorder is None or begun is None:
            return
        _record(recorder, "forward", *begun, self._device)
        recorder.lane_of_thread().layer = 0
        # What is deferred, which is of other classes, is computed with the layer that follows.
        piece = out.local if type(out) is Slab else out
        if type(piece) is Tensor and torch.is_grad_enabled():
            node: Any = piece.grad_fn
            # What another layer made, and this one only passes on, is that one's.
            if node is not None and node.metadata.setdefault(_MAKER, self) is self:
                node.register_prehook(self._backward)

    def _backward(self, grads: Any) -> None:
        if (recorder := active.recorder) is not None:
            _LayerBackward.of_this_pass(recorder, self._device).reach(
                recorder.number_of(self._name)
            )


def _record(
    recorder: Recorder, name: str, start: int, mark: Mark | None, device: torch.device
) -> None:
    spans = None if mark is None else device_spans(device)
    if spans is None or mark is None:
        recorder.add(Category.compute, name, start, recorder.now())
    else:
        recorder.add(Category.other, f"launch {name}", start, recorder.now())
        spans.add(COMPUTE, Category.compute, name, mark)


class _LayerBackward:
    """The layer that a backward pass is in."""

    current: _LayerBackward | None = None

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder, self._device = recorder, device
        self._layer = self._start = 0
        self._mark: Mark | None = None

    @classmethod
    def of_this_pass(cls, recorder: Recorder, device: torch.device) -> _LayerBackward:
        found = cls.current
        if found is None or found._recorder is not recorder:
            found = cls.current = cls(recorder, device)
            Variable._execution_engine.queue_callback(found._finish)
        return found

    def reach(self, layer: int) -> None:
        self._close()
        spans = device_spans(self._device)
        self._start = self._recorder.now()
        self._mark = None if spans is None else spans.mark()
        self._recorder.lane_of_thread().layer = self._layer = layer

    def _close(self) -> None:
        lane = self._recorder.lane_of_thread()
        if self._layer:
            lane.layer = self._layer
            _record(self._recorder, "backward", self._start, self._mark, self._device)
        lane.layer = self._layer = 0

    def _finish(self) -> None:
        self._close()
        type(self).current = None
