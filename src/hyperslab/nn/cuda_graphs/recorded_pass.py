"""A forward and a backward pass of a module, recorded once and replayed on new values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from hyperslab.comm.graph import held_constants
from hyperslab.comm.journal import journal
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.messages import follow_exchanges, without_messages
from hyperslab.errors import ConfigError
from hyperslab.nn.cuda_graphs.recorder import CudaRecorder
from hyperslab.nn.cuda_graphs.replayable import (
    CannotReplayError,
    StateBefore,
    check_output,
    plain_values,
    sharing,
)
from hyperslab.nn.cuda_graphs.static_pass import Given, OutputNumbers, StaticPass, given_tensors
from hyperslab.nn.module_snapshot import ModuleSnapshot, TensorVersions
from hyperslab.nn.outputs import map_tensors, tensors_of
from hyperslab.nn.parallel.gradient_averaging import Averaging, gradient_hook_of
from hyperslab.nn.trial_run import no_trace, unjournaled
from hyperslab.torch_private import apply_function, foreach_mul


class Recorded:
    """A pass of ``module`` on arguments like ``given``, recorded, which leaves no trace.

    Raises ``CannotReplayError`` where replays would not do the same.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        module: nn.Module,
        mesh: Mesh,
        recorder: CudaRecorder,
        memory: ActivationMemory,
        given: Given,
        usual: OutputNumbers | None,
        *,
        averages: bool,
    ) -> None:
        """Gradients of the outputs ``usual`` are expected to come together, if of any.

        Where it ``averages``, those of weights become means over ranks while they are computed.

        On several ranks it needs no other rank: a pass is tried out without messages, and replays
        send the same messages as ordinary passes.
        """
        self._pass = StaticPass(run, module, given, mesh, averages=averages)
        self._memory, self._mesh, self._recorder = memory, mesh, recorder
        self._averages = averages
        with (
            no_trace(module, mesh.device),
            unjournaled(),
            _same_values(module, mesh.device),
            _same_seeds(mesh.device),
        ):
            with without_messages(mesh):
                self._practise(module, recorder, usual)
            with held_constants() as self._constants:
                self._record(recorder)

    def _practise(
        self, module: nn.Module, recorder: CudaRecorder, usual: OutputNumbers | None
    ) -> None:
        """Runs the pass twice: to be compiled and to choose algorithms, and to be looked at."""
        own = self._pass
        with recorder.practice():
            own.forward()
            own.find_sources(usual)
            for numbers in own.gradient_sets:
                own.backward(numbers)
        values = plain_values(own.out)
        before, num_noted = StateBefore(module, own.inputs), journal.count
        with recorder.practice(), recorder.watch_for_waits() as waits:
            own.run()
        self._operators = journal.since(num_noted)
        before.check(waits)
        own.weights.check()
        check_output(own.out, own.device, [*own.inputs, *before.state.tensors])
        if plain_values(own.out) != values:
            raise CannotReplayError("it returns numbers that differ between passes")
        self._state = before.state  # keeps alive what the recorded pass reads
        saved = sharing(before.state.tensors, own.saved)
        self._saved = [tensor for tensor in saved if not tensor.is_inference()]

    def _record(self, recorder: CudaRecorder) -> None:
        own = self._pass
        own.forget()
        outputs, self._forward_again = recorder.record(own.forward)
        self._backwards = {
            numbers: recorder.record(partial(own.backward, numbers))
            for numbers in own.gradient_sets
        }
        self._outputs = [out.detach() for out in outputs]
        self._without_grad = [i for i in range(len(outputs)) if i not in own.grads]
        self._hooked = [(hook, w) for w in own.trained if (hook := gradient_hook_of(w))]
        self._template = map_tensors(Tensor.detach, own.out)
        own.forget()

    def __call__(self, given: Given) -> Any:
        """What the module would return."""
        tensors = given_tensors(given)
        self._recorder.follow()
        with torch.no_grad():
            for own, tensor in zip(self._pass.inputs, tensors, strict=True):
                own.copy_(tensor)
        journal.repeat(self._operators, self._pass.seeds.refill())
        if self._pass.grads:
            sources = self._pass.sources(tensors, self._pass.weights.originals)
            outputs = apply_function(_Replay, self, *sources)
        else:
            outputs = self.replay_forward()
        rest = iter(outputs)
        return map_tensors(lambda _: next(rest), self._template)

    def replay_forward(self) -> list[Tensor]:
        """Outputs that no later replay overwrites."""
        follow_exchanges(self._mesh)
        self._forward_again()
        return [out.clone() for out in self._outputs]

    def begin(self, outputs: Sequence[Tensor]) -> tuple[PendingBackward, list[Tensor]]:
        """What the backward pass of the last replay will need, and outputs without gradients."""
        pending = PendingBackward(self._saved)
        self._memory.use_for(pending)
        return pending, [outputs[place] for place in self._without_grad]

    def replay_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs and weights, where any of ``grads`` leads there."""
        own = self._pass
        given = OutputNumbers(place for place in own.grads if grads[place] is not None)
        if given not in self._backwards and self._mesh.num_ranks > 1:
            raise self._unknown(given, "for which ranks send other messages")
        numbers = given if given in self._backwards else own.gradient_sets[-1]
        for place in numbers:
            if (grad := grads[place]) is None:
                own.grads[place].zero_()
            else:
                own.grads[place].copy_(grad)
        found, run_again = self._backwards[numbers]
        follow_exchanges(self._mesh)
        run_again()
        if numbers != given:
            found = self._reached(given, found)
        copies = _copies(found)
        if self._averages:
            means = copies[len(copies) - len(self._hooked) :]
            Averaging.of_this_pass(self._mesh).note_means(self._hooked, means)
        return copies

    def _reached(self, given: OutputNumbers, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those of ``found`` that autograd brings gradients of the outputs ``given``.

        The other outputs had gradients of zero, which make NaN of a derivative that is infinite.
        """
        reach = [self._pass.reach[place] for place in given]
        kept = [x if any(own[i] for own in reach) else None for i, x in enumerate(found)]
        if not all(grad.isfinite().all() for grad in kept if grad is not None):
            raise self._unknown(given, "and zeros for the others made some infinite or NaN")
        return kept

    def _unknown(self, given: OutputNumbers, why: str) -> ConfigError:
        recorded = " or ".join(str(sorted(numbers)) for numbers in self._pass.gradient_sets)
        return ConfigError(
            f"a backward pass of outputs {sorted(given)} alone (CUDA graphs have recorded those of "
            f"{recorded}, {why}): use the same outputs in every loss, or parallelize without "
            "cuda_graphs"
        )


def _copies(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``grads`` in memory that no replay overwrites: ``param.grad`` may come to be one of them."""
    kept = [grad for grad in grads if grad is not None]
    copies = iter(foreach_mul(kept, 1) if kept else [])
    return [None if grad is None else next(copies) for grad in grads]


class _Replay(Function):
    """A recorded pass as one function, of the inputs and weights that want gradients."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = recorded.replay_forward()
        ctx.recorded = recorded
        ctx.pending, without_grad = recorded.begin(outputs)
        ctx.mark_non_differentiable(*without_grad)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.pending.begin()
        return None, *ctx.recorded.replay_backward(grads)


@contextmanager
def _same_values(module: nn.Module, device: torch.device) -> Iterator[None]:
    """After it, buffers and other tensors that modules hold, but weights, have the same values."""
    held = [x for x in ModuleSnapshot(module, device).tensors if not isinstance(x, Parameter)]
    memory = [x.untyped_storage() for x in held if not x.is_meta]
    kept = {each.data_ptr(): (each, each.clone()) for each in memory}
    try:
        yield
    finally:
        for each, values in kept.values():  # no tensor counts it
            each.copy_(values)


def _same_seeds(device: torch.device) -> Any:
    """A context after which torch draws the numbers that it would have drawn without it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class PendingBackward:
    """A forward pass that was replayed; its backward pass may be yet to come."""

    def __init__(self, saved: Sequence[Tensor]) -> None:
        """Of ``saved`` the backward pass needs the values that they have now."""
        self._saved, self.is_done = TensorVersions(saved), False

    def begin(self) -> None:
        """Says that the backward pass comes now."""
        if self.is_done:
            raise ConfigError(
                "a second backward pass through one forward pass, whose activations CUDA graphs "
                "have overwritten: add up the losses and call backward once, or parallelize "
                "without cuda_graphs"
            )
        self.is_done = True
        if self._saved.have_changed():
            raise ConfigError(
                "weights or buffers were written into between a forward pass and its backward "
                "pass, which needs those of the forward pass: step the optimizer after the "
                "backward pass"
            )


class ActivationMemory:
    """The memory of activations that all recorded passes share: one pass at a time uses it."""

    def __init__(self) -> None:
        self._user: Callable[[], PendingBackward | None] = lambda: None

    @property
    def is_in_use(self) -> bool:
        """Whether a backward pass may still come that needs what lies there."""
        pending = self._user()
        return pending is not None and not pending.is_done

    def use_for(self, pending: PendingBackward) -> None:
        self._user = weakref.ref(pending)


def note_used(out: Any, note: Callable[[OutputNumbers], None]) -> Any:
    """``out``, with copies in it: ``note`` gets the places of those that get gradients.

    A hook of each tensor would not tell: one that others are computed from always gets a gradient.
    """
    outputs = tensors_of(out)
    places = [place for place, tensor in enumerate(outputs) if tensor.requires_grad]
    if len(places) < 2:  # then it gets one, or there is no backward pass
        return out
    given = [outputs[place] for place in places]
    copies = _Note.apply(note, places, *given)  # type: ignore[no-untyped-call]
    rest = iter({**dict(enumerate(outputs)), **dict(zip(places, copies, strict=True))}.values())
    return map_tensors(lambda _: next(rest), out)


class _Note(Function):
    @staticmethod
    def forward(
        ctx: Any, note: Callable[[OutputNumbers], None], places: list[int], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.note, ctx.places = note, places
        return tuple([output.clone() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.places, grads, strict=True)
        ctx.note(OutputNumbers(place for place, grad in pairs if grad is not None))
        return None, None, *grads
